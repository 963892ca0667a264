"""pretrain.py: how a model becomes sparse: dense first, then the indexer alone, then both.

    python pretrain.py --model FOLDER --text FILE.txt --out sparse.pt     # or --task SPEC
    python train_sync.py --model FOLDER --init sparse.pt                  # the indexer is frozen
    python bench.py recipe                    # all of it on the task `recall`, every stage examined

The stages are those of DeepSeek-V3.2-Exp's report and of GLM-5's (arXiv 2602.15763):
  dense    Everything but the indexer learns the text. Attention is dense. A loaded model has
           learned already: --dense-steps is 0 by default.
  warm-up  Only the indexer learns, everything else is frozen. Attention stays dense. The loss is
           KL(p || softmax(I)) over the chunks before a query: I are the indexer's scores, and p is
           the dense attention, summed over heads and over the keys of a chunk, made to sum to one.
  sparse   Attention reads what the indexer selects. The indexer learns the same KL among the
           selected chunks only; everything else learns the language-model loss.
What follows is RL, in which no gradient reaches the indexer.
Neither loss reaches the other's parameters: the indexer's input is detached (model.py), selection
has no gradient, and p is detached here. The chunk of the query itself is always selected; it has no
competitor, so p leaves it out.

Text of yours is one long line of tokens, cut into rows of --length: a file, or a task's prompts
with their best answers. The loss is on every next token, those of prompts too, among the whole
vocabulary. A line for each stage tells what it was worth on held-out text (the last tenth of a
file, or the problems that a task holds out): the KL of the indexer, summed over layers, and the
loss with sparse and with dense attention. After "dense" nobody has trained the indexer yet.
Matrices are trained by Muon (as in GLM-4.5 and GLM-5), the rest and the indexer by AdamW. torch's
Muon computes in bfloat16: a processor without instructions for it needs 20 minutes for a step of
SmolLM2 (for one of the warm-up, which has no Muon, 9 seconds). In the sparse stage --sparse-lr is
the share of both rates that is left: little by default, for a loaded model; 0.1 suits one that
began with random weights.

Left out: weight decay, a dense twin that trains as long as the whole recipe, GPUs, and speed:
training uses dense masks instead of the sparse kernels, so memory grows with the square of a row.

Axes: B texts · T tokens of each · N = B T · H heads · D head width · K chunks of a text · d width
      A answers of a text, of m tokens each · M tokens that are predicted
      V' tokens of the alphabet: the task's, or all
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import dsa
from logprobs import PIECE
from model import GPT, ModelConfig, attend_packed, pack_tokens, recomputed
from reward import Task, advance, forget, make_task
from runtime.config import LONGEST_CONTEXT, Config, blame, check, flag, require
from runtime.folder import open_plain, write_file
from runtime.models import make_model
from runtime.terminal import run_main
from runtime.tokenizer import Tokenizer, tokenizer_of

TASK_TOKENS = 1 << 17  # so much text is made of a task's problems, and of those it holds out


@dataclass(frozen=True)
class Stages:
    """What the recipe and a model of yours both need to know; fields are flags."""

    seed: int = flag(0, "of weights and text", 0, 2**31 - 1)
    chunk_size: int = flag(1, "keys in a chunk, a power of two", 1, 512)
    top_k: int = flag(16, "chunks that a query attends to", 1)
    index_heads: int = flag(4, "heads of the indexer (DeepSeek-V3.2: 64)", 1)
    index_width: int = flag(16, "width of its heads (128)", 4)
    dense_steps: int = flag(400, "steps of the dense stage (on all lengths)", 1)
    warmup_steps: int = flag(100, "steps of the indexer's warm-up", 1)
    sparse_steps: int = flag(300, "steps of the sparse stage", 1)
    tokens: int = flag(2048, "tokens in a step", 1)
    lr: float = flag(3e-3, "learning rate of AdamW, for all but matrices and indexer")
    matrix_lr: float = flag(0.02, "learning rate of Muon, for matrices")
    sparse_lr: float = flag(0.5, "share of both that is left in the sparse stage")
    index_lr: float = flag(5e-3, "learning rate of AdamW, for the indexer")


@dataclass(frozen=True)
class SparseConfig(Stages):
    """What `python pretrain.py` needs to know."""

    dense_steps: int = flag(0, "steps of the dense stage, for a model of random weights")
    sparse_lr: float = flag(1e-3, "share of lr and matrix-lr in the sparse stage")
    model: str = flag("tiny", "the dense model, as in train_sync.py")
    text: str = flag("", "text file to learn from, in UTF-8; or")
    task: str = flag("", "task, whose prompts with their best answers are the text")
    length: int = flag(512, "tokens in a row of text", 2, LONGEST_CONTEXT)
    out: str = flag("sparse.pt", "file of weights to write")


# ---------------------------------------------------------------------------------- text of yours


def read_text(config: SparseConfig, tokenizer: Tokenizer) -> list:
    """Tokens of a text to learn from, and of one that is held out. Raises UserError."""
    if config.task:
        task = make_task(config.task, config.seed, tokenizer)
        return [list(islice(episodes(task, split), TASK_TOKENS)) for split in ("train", "eval")]
    with blame(f"--text {config.text}: must be a text file in UTF-8", ValueError):
        with open_plain(Path(config.text)) as file:
            tokens = tokenizer.encode(file.read().decode())
    held_out = max(config.length, len(tokens) // 10)
    return [tokens[:-held_out], tokens[-held_out:]]


def episodes(task: Task, split: str) -> Iterator:
    """Tokens without end: problems with their best answers, as RL sees them."""
    encode = task.tokenizer.encode
    for index in count():
        problem = task.reset(index % task.eval_size if split == "eval" else index, split)
        yield from task.tokenizer.encode_prompt(problem["prompt"])
        said, states = [], {}
        for answer in task.solve(problem):
            said.append(answer)
            yield from encode(answer)
            if task.stop:
                yield task.tokenizer.end
            step = advance(task, states, index, problem, said)
            yield from encode(step.observation or "")
        forget(task, states, index)


def row_batches(tokens: list, config: SparseConfig) -> Iterator:
    """Batches of rows [B, T], drawn at random without end, as from `make_batch`: every token but
    the first is an answer, and the alphabet is everything."""
    T, random = config.length, np.random.default_rng(config.seed)
    rows = torch.tensor(tokens).unfold(0, T, T)  # what is left at the end is dropped
    while True:
        chosen = random.permutation(len(rows))[: max(1, config.tokens // T)]
        yield rows[chosen], torch.arange(1, T)[:, None], ...


# ------------------------------------------------------------------------------------- the model


def with_indexer(config: Stages) -> dict:
    """What the shape of a sparse model has beside that of a dense one."""
    knobs = ("chunk_size", "top_k", "index_heads", "index_width")
    shape = {name: getattr(config, name) for name in knobs}
    return shape | {"attention": "dsa", "scoring": "indexer"}


def sparse_model(config: SparseConfig) -> tuple:
    """The model of --model with an indexer, random by seed, and its vocabulary."""
    how = check(Config(model=config.model, seed=config.seed))
    tokenizer = tokenizer_of(how)
    # to make a model, a row of text is a task's prompt with one token to answer
    dense = make_model(how, Task(None, None, None, config.length - 1, 1, tokenizer=tokenizer))
    model = GPT(replace(dense.config, **with_indexer(config)), config.seed)
    model.load_state_dict(dense.state_dict(), strict=False)
    return model, tokenizer


def watched_attention(config: ModelConfig, B: int, T: int, sparse: bool, seen: list) -> Callable:
    """Attention of B texts of T tokens, dense or sparse, by masks. Each layer that calls it appends
    to `seen` the indexer's scores of the chunks that compete, or (sparse) are selected among them
    [N, K] (-inf: the others), and the attention that chunks get, averaged over heads [N, K], which
    sums to one."""
    tables = dsa.packed_tables(torch.arange(0, B * T + 1, T), config.chunk_size)
    causal, K = torch.ones(T, T, dtype=torch.bool).tril(), tables.widest

    def grid(x: Tensor) -> Tensor:  # [N, Hq or Hkv, D] -> [B, Hq, T, D]
        x = x.repeat_interleave(config.heads // x.shape[1], dim=1)  # each query head's own keys
        return x.view(B, T, *x.shape[1:]).transpose(1, 2)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, index: tuple) -> Tensor:
        q_index, k_index, weights = index
        means = dsa.chunk_means(k_index[:, None], tables)
        scores = dsa.index_scores(q_index, means, weights, tables)  # [N, 1, K]
        visible = causal
        if sparse:
            picks = dsa.top_chunks(scores, tables, config.top_k)[:, 0] - tables.first[:, None]
            chunks = torch.arange(K)  # where nothing is picked, an id is negative
            selected = (picks[:, :, None] == chunks).any(1)  # [N, K]
            scores = scores.masked_fill(~selected[:, None], -torch.inf)
            keys = selected.repeat_interleave(config.chunk_size, 1)[:, :T]
            visible = causal & keys.view(B, 1, T, T)
        logits = grid(q) * config.head_width**-0.5 @ grid(k).mT  # [B, H, T, T]
        weights = logits.masked_fill_(~visible, -torch.inf).softmax(-1)
        mass = F.pad(weights.detach().mean(1), (0, K * config.chunk_size - T))  # whole chunks
        seen.append((scores[:, 0], mass.view(B * T, K, -1).sum(-1)))
        return (weights @ grid(v)).transpose(1, 2).reshape(q.shape)

    return attend


def indexer_loss(scores: Tensor, mass: Tensor) -> Tensor:
    """KL(p || softmax(scores)) over the chunks that a query scores: the mean over the queries that
    have any. Both [N, K]; p is `mass` without the others, such as the query's own chunk."""
    among = scores > -torch.inf
    p = mass.masked_fill(~among, 0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-9)
    log_q = scores.masked_fill(~among, -1e30).log_softmax(-1)
    divergence = F.kl_div(log_q, p, reduction="sum")  # 0 where nothing competes
    return divergence / among.any(-1).sum().clamp(min=1)


def answer(model: GPT, batch: tuple, attend: Callable) -> tuple:
    """Mean cross-entropy of the answers, and which are exact: given the right tokens before, all
    tokens of such an answer are the most probable of the alphabet, as in greedy decoding.

    tokens [B, T], columns [A, m], alphabet [V'] -> scalar, bool [B, A].
    """
    tokens, columns, alphabet = batch
    B, T = tokens.shape
    hidden = model.body(tokens.flatten(), torch.arange(T).repeat(B), attend)
    hidden = hidden.view(B, T, -1)[:, columns.flatten() - 1].flatten(0, 1)  # [M, d]
    right = tokens[:, columns].flatten()  # [M]
    if alphabet is not ...:  # the task's (digits and end) only, as the generator and RL do
        right = torch.searchsorted(alphabet, right)  # places in the alphabet

    def piece(hidden, right):
        logits = model.logits(hidden, alphabet)  # [m, V']
        return F.cross_entropy(logits, right, reduction="sum"), logits.argmax(-1) == right

    # as in logprobs.py: logits of no more than PIECE pairs of a token and a word are there at once
    size = PIECE // model.config.vocab_size
    again = partial(recomputed, piece)
    losses, exact = zip(*map(again, hidden.split(size), right.split(size)), strict=True)
    return sum(losses) / len(right), torch.cat(exact).view(B, *columns.shape).all(-1)


def losses_of(model: GPT, batch: tuple, stage: str) -> tuple:
    """Loss of the answers, loss of the indexer, summed over layers (dense stage: 0), and which
    answers are exact."""
    tokens, seen = batch[0], []
    attend = watched_attention(model.config, *tokens.shape, stage == "sparse", seen)
    if stage == "dense":
        attend = attend_packed(replace(model.config, attention="dense"), pack_tokens(list(tokens)))
    loss, exact = answer(model, batch, attend)
    return loss, sum([indexer_loss(*layer) for layer in seen], torch.zeros(())), exact


# ------------------------------------------------------------------------------------ the stages


def parts_of(model: GPT) -> dict:
    """The parameters that are trained alike: indexer, matrices of the layers, others."""
    parts = {"indexer": [], "matrices": [], "others": []}
    for name, p in model.named_parameters():
        kind = "matrices" if name.startswith("layers.") and p.dim() == 2 else "others"
        parts["indexer" if ".indexer." in name else kind].append(p)
    return parts


def make_optimizers(model: GPT, config: Stages, stage: str) -> list:
    """The optimizers of what a stage trains; the rest is frozen."""
    share, rates, optimizers = config.sparse_lr if stage == "sparse" else 1.0, {}, []
    if stage != "warm-up":
        rates = {"matrices": config.matrix_lr * share, "others": config.lr * share}
    if stage != "dense":
        rates["indexer"] = config.index_lr
    muon = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    for kind, parameters in parts_of(model).items():
        for p in parameters:
            p.requires_grad_(kind in rates)
        if kind in rates:
            make = muon if kind == "matrices" else torch.optim.AdamW
            optimizers.append(make(parameters, lr=rates[kind], weight_decay=0.0))
    return optimizers


def train_step(model: GPT, batch: tuple, stage: str, optimizers: list, decay: float) -> float:
    """One step of a stage: its losses, clipped gradients, weights. Returns the share of answers
    that were exact."""
    model.flat_grad.zero_()
    loss, kl, exact = losses_of(model, batch, stage)
    (kl if stage == "warm-up" else loss + kl).backward()
    for optimizer in optimizers:
        (group,) = optimizer.param_groups
        # each by itself: a common norm would let one loss scale the other's step
        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        group["lr"] = optimizer.defaults["lr"] * decay
        optimizer.step()
    return exact.float().mean().item()


def train_stage(model: GPT, config: Stages, stage: str, steps: int, batches: Iterator) -> None:
    """So many steps of a stage on the next batches, with a learning rate that falls to zero."""
    optimizers = make_optimizers(model, config, stage)
    for step in tqdm(range(steps), stage):
        train_step(model, next(batches), stage, optimizers, 1 - step / steps)


# ------------------------------------------------------------------------------- a model of yours


def train(config: SparseConfig) -> None:
    """Every stage in turn, what it was worth on held-out text, and the weights, in a file."""
    said = f"--text {config.text!r}, --task {config.task!r}: must be one of the two"
    require(bool(config.text) != bool(config.task), said)
    path = Path(config.out)
    free = path.parent.is_dir() and not path.exists()
    require(free, f"--out {path}: must be a new file in a folder that exists")
    model, tokenizer = sparse_model(config)
    texts = read_text(config, tokenizer)
    most = sum(map(len, texts)) // 2
    said = f"--length {config.length}: must be at most {most}, half of the text"
    require(config.length <= most, said)
    batches, held_out = (row_batches(text, config) for text in texts)
    batch = next(held_out)
    for stage in ("dense", "warm-up", "sparse"):
        if steps := getattr(config, stage.replace("-", "") + "_steps"):
            train_stage(model, config, stage, steps, batches)
        with torch.no_grad():
            dense, kl, _ = losses_of(model, batch, "warm-up")
            sparse, _, _ = losses_of(model, batch, "sparse")
        loss = f"loss: sparse {sparse:.3f}, dense {dense:.3f}"
        tqdm.write(f"after {stage:8} KL {kl:.3f}   {loss}")
    torch.save({"shape": vars(model.config), "weights": model.flat}, memory := io.BytesIO())
    write_file(path, memory.getvalue())  # what --init reads


if __name__ == "__main__":
    run_main(train, __doc__, SparseConfig)
