"""pretrain.py: how a sparse-attention model is made: dense, then the indexer alone, then both.

`python recipe.py` runs all of it on `recall` and measures every stage.

The stages are those of DeepSeek-V3.2-Exp's report and of GLM-5's (arXiv 2602.15763):
  dense    everything but the indexer learns the task's own text, attention is dense;
  warm-up  only the indexer learns: KL(p || softmax(I)) on all chunks of a query's past, where I are
           its scores and p the dense attention, summed over heads and over the keys of a chunk,
           normalised to one. Attention stays dense, everything else is frozen;
  sparse   attention reads what the indexer selects. The indexer learns the same KL restricted to
           that selection (p renormalised on it), everything else the language-model loss;
  RL       train_sync.py's step, with the indexer frozen.
Neither loss reaches the other's parameters: the indexer's input is detached (model.py), selection
has no gradient, and p is detached here. A query's own chunk is always selected, so it does not
compete and is left out of p.

Text: a problem of the task (never a held-out one), then many questions on its table instead of
one; the loss is on the answers. Questions on two pairs come first, and the table doubles whenever
nine answers in ten are right: from long tables the match of keys is not learned in minutes.
Matrices are trained by Muon (as GLM-4.5's and GLM-5's), the rest and the indexer by AdamW.

Left out: other tasks, weight decay, the reports' learning rates (this model is tiny), a dense
twin trained for as long as the full recipe, and speed: dense masks stand in for sparse kernels
while training; every accuracy is measured on the real sparse path.

Axes: B texts · T tokens of each · N = B T · H heads · D head width · K chunks of a text
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import dsa
from model import GPT, ModelConfig, dense_packed, pack_tokens
from reward import Task, make_task
from rollout import alphabet_of
from runtime.config import flag
from runtime.tokenizer import END, encode

MULTIPLES = (2, 4, 8, 16)  # lengths of the prompts, in attended keys


@dataclass(frozen=True)
class Settings:
    """Everything the recipe needs to know; fields are flags."""

    seed: int = flag(0, "of weights and text", 0, 2**31 - 1)
    seeds: int = flag(1, "how many seeds to run, from --seed on", 1, 100)
    out: str = flag("", "run folder (default: runs/ and a name with the time)")
    chunk_size: int = flag(1, "keys in a chunk, a power of two", 1, 64)
    top_k: int = flag(16, "chunks a query attends to", 1, 64)
    grow_steps: int = flag(2000, "most steps of the dense stage while its tables grow", 1)
    dense_steps: int = flag(400, "steps of the dense stage on all lengths", 1)
    warmup_steps: int = flag(100, "steps of the indexer's warm-up", 1)
    sparse_steps: int = flag(300, "steps of the sparse stage", 1)
    rl_steps: int = flag(10, "steps of RL with the indexer frozen (0: none)", 0)
    tokens: int = flag(2048, "tokens of a step", 1)
    lr: float = flag(3e-3, "AdamW, all but matrices and indexer", 0.0, 1.0)
    matrix_lr: float = flag(0.02, "Muon", 0.0, 1.0)
    sparse_lr: float = flag(0.5, "share of both in the sparse stage", 0.0, 1.0)
    index_lr: float = flag(5e-3, "AdamW, the indexer", 0.0, 1.0)
    problems: int = flag(512, "held-out problems of the longest length", 1, 100000)

    @property
    def lengths(self) -> list[int]:  # of the prompts
        return [self.chunk_size * self.top_k * multiple for multiple in MULTIPLES]


def make_text(task: Task, index: int) -> tuple[np.ndarray, np.ndarray]:
    """A training problem's table, then "?key=51<end>" for half as many pairs, drawn with
    replacement: tokens [T], and the columns [M] of the answers."""
    prompt = np.array(encode(task.reset(index, "train")["prompt"]))
    start = int(np.flatnonzero(prompt == encode("?")[0])[0])
    width = len(prompt) - start - 2  # tokens of a key
    rows = prompt[:start].reshape(-1, width + 4)  # "key=51;"
    count = max(1, len(rows) // 2)
    asked = rows[np.random.default_rng(index).integers(len(rows), size=count)]
    ask, end = np.full((count, 1), prompt[start]), np.full((count, 1), END)
    questions = np.hstack([ask, asked[:, :-1], end])
    first = start + (width + 5) * np.arange(count)[:, None]
    columns = first + np.arange(width + 2, width + 5)
    return np.concatenate([prompt[:start], questions.ravel()]), columns.ravel()


def make_batch(length: int, seed: int, start: int, tokens: int) -> tuple[Tensor, ...]:
    """About `tokens` tokens of text [B, T] on problems recall:`length`, the columns [M] of their
    answers, and the tokens [V] an answer may have."""
    task = make_task(f"recall:{length}", seed)
    first, columns = make_text(task, start)
    texts = [make_text(task, start + i)[0] for i in range(1, max(4, tokens // len(first)))]
    alphabet = torch.from_numpy(alphabet_of(task))  # [V'] ascending
    return torch.from_numpy(np.stack([first, *texts])), torch.from_numpy(columns), alphabet


def make_model(settings: Settings, seed: int) -> GPT:
    """Two layers are the least for recall: one finds the key of a value, the next compares keys."""
    shape = dict(layers=2, width=64, heads=8, kv_heads=4, head_width=16, hidden=128)
    shape |= dict(
        positions="rope", rope_base=1000.0, qk_norm=True, context=2 * settings.lengths[-1]
    )
    sparse = dict(attention="dsa", scoring="indexer", index_heads=4, index_width=16)
    sparse |= dict(chunk_size=settings.chunk_size, top_k=settings.top_k)
    return GPT(ModelConfig(**shape, **sparse), seed)


def watched_attention(config: ModelConfig, B: int, T: int, sparse: bool, seen: list) -> Callable:
    """Attention of B texts of T tokens, dense or sparse, by masks, that appends for its layer to
    `seen`: scores [N, K] (-inf: no candidate), selected [N, K], mass [N, K] (sums to one)."""
    tables = dsa.packed_tables(torch.arange(0, B * T + 1, T), config.chunk_size)
    causal, K = torch.ones(T, T, dtype=torch.bool).tril(), tables.widest

    def grid(x: Tensor) -> Tensor:  # [N, Hq or Hkv, D] -> [B, Hq, T, D]
        x = x.repeat_interleave(config.heads // x.shape[1], dim=1)
        return x.view(B, T, *x.shape[1:]).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, index: tuple) -> Tensor:
        scores = dsa.index_scores(*index, tables)  # [N, 1, K]
        picks = dsa.top_chunks(scores, tables, config.top_k)[0][:, 0] - tables.first[:, None]
        selected = torch.zeros(B * T, K + 1, dtype=torch.bool)
        selected = selected.scatter(1, picks.where(picks >= 0, K), True)[:, :K]
        visible = causal
        if sparse:
            keys = selected.repeat_interleave(config.chunk_size, 1)[:, :T]
            visible = causal & keys.view(B, 1, T, T)
        logits = grid(q) * config.head_width**-0.5 @ grid(k).mT  # [B, H, T, T]
        chance = logits.masked_fill_(~visible, -torch.inf).softmax(-1)
        mass = F.pad(chance.detach().mean(1), (0, K * config.chunk_size - T))  # [B, T, K * C]
        mass = mass.view(B * T, K, -1).sum(-1)
        seen.append((scores[:, 0], selected, mass))
        return (chance @ grid(v)).transpose(1, 2).reshape(q.shape)

    return attend


def indexer_loss(scores: Tensor, selected: Tensor, mass: Tensor, sparse: bool) -> Tensor:
    """KL(p || softmax(scores)) over a query's candidates, or the selected ones among them; the mean
    over queries that have any. All arguments [N, K]; p is `mass` without the query's own chunk."""
    among = scores > -torch.inf
    among = among & selected if sparse else among
    p = mass.masked_fill(~among, 0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-9)
    log_q = scores.masked_fill(~among, -1e30).log_softmax(-1)
    divergence = (torch.xlogy(p, p) - p * log_q).sum(-1)  # [N], 0 where nothing competes
    return divergence.sum() / among.any(-1).sum().clamp(min=1)


def losses_of(model: GPT, tokens: Tensor, columns: Tensor, alphabet: Tensor, stage: str) -> tuple:
    """Losses of the answers and of the indexer (summed over layers), and which answers are exact.

    tokens [B, T], columns [M] -> scalar, scalar, bool [B, M / 3]."""
    (B, T), layers, seen = tokens.shape, model.config.layers, []
    if stage == "dense":
        packed = pack_tokens(list(tokens))
        attend = lambda q, k, v, index: dense_packed(q, k, v, packed)  # noqa: E731
    else:
        attend = watched_attention(model.config, B, T, stage == "sparse", seen)
    hidden = model.body(tokens.flatten(), torch.arange(T).repeat(B), [attend] * layers)
    # over the task's alphabet (digits and end) only, as the generator and RL do
    logits = model.logits(hidden.view(B, T, -1)[:, columns - 1], alphabet)  # [B, M, V']
    answers = torch.searchsorted(alphabet, tokens[:, columns])  # [B, M] places in the alphabet
    exact = (logits.argmax(-1) == answers).view(B, -1, 3).all(-1)
    kl = sum(indexer_loss(*layer, stage == "sparse") for layer in seen)
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten()), kl, exact


def parts_of(model: GPT) -> dict[str, list]:
    """The parameters that are trained alike: indexer, matrices of the layers, others."""
    parts = {"indexer": [], "matrices": [], "others": []}
    for name, p in model.named_parameters():
        kind = "matrices" if name.startswith("layers.") and p.dim() == 2 else "others"
        parts["indexer" if ".indexer." in name else kind].append(p)
    return parts


def make_optimizers(model: GPT, settings: Settings, stage: str) -> list:
    """[(parameters, optimizer, learning rate)] of what a stage trains; the rest is frozen."""
    parts = parts_of(model)
    share = settings.sparse_lr if stage == "sparse" else 1.0
    rates = {"matrices": settings.matrix_lr * share, "others": settings.lr * share}
    rates = {} if stage == "warm-up" else rates
    rates |= {} if stage == "dense" else {"indexer": settings.index_lr}
    for kind, parameters in parts.items():
        for p in parameters:
            p.requires_grad_(kind in rates)
    make = {"matrices": partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")}
    return [
        (parts[kind], make.get(kind, torch.optim.AdamW)(parts[kind], weight_decay=0.0), rate)
        for kind, rate in rates.items()
    ]


def train_step(model: GPT, batch: tuple, stage: str, optimizers: list, decay: float) -> dict:
    """One step of a stage: its losses, clipped gradients, weights. Returns what happened."""
    model.flat_grad.zero_()
    loss, kl, exact = losses_of(model, *batch, stage)
    {"dense": loss, "warm-up": kl, "sparse": loss + kl}[stage].backward()
    for parameters, optimizer, rate in optimizers:
        # each by itself: a common norm would let one loss scale the other's step
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = rate * decay
        optimizer.step()
    found = {"loss": loss, "kl": torch.as_tensor(kl), "exact": exact.float().mean()}
    return {name: float(value.detach()) for name, value in found.items()}


def grow(model: GPT, settings: Settings, seed: int) -> tuple[int, int]:
    """The dense stage's first part: short texts, doubled whenever nine answers in ten are right.
    Returns steps and problems used; a model that is stuck stops at `grow_steps`."""
    length, used, right = 16, 0, 0.0
    optimizers = make_optimizers(model, settings, "dense")
    for step in tqdm(range(settings.grow_steps), f"seed {seed} dense, growing"):
        batch = make_batch(length, seed, used, settings.tokens)
        used += len(batch[0])
        result = train_step(model, batch, "dense", optimizers, min(1.0, step / 20))
        right = 0.9 * right + 0.1 * result["exact"]
        if right > 0.9:
            if length == settings.lengths[-1]:
                break
            length, right = min(2 * length, settings.lengths[-1]), 0.0
    return step + 1, used


def train(model: GPT, settings: Settings, seed: int, stage: str, steps: int, used: int) -> dict:
    """A stage on texts of all lengths in turn, with a learning rate that falls to zero."""
    optimizers, history = make_optimizers(model, settings, stage), []
    for step in tqdm(range(steps), f"seed {seed} {stage}"):
        length = settings.lengths[step % len(settings.lengths)]
        batch = make_batch(length, seed, used, settings.tokens)
        used += len(batch[0])
        history.append(train_step(model, batch, stage, optimizers, 1 - step / steps))
    last = history[-len(settings.lengths) :]
    return {key: round(float(np.mean([row[key] for row in last])), 4) for key in last[0]}
