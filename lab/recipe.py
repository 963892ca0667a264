"""recipe.py: what the training stages of sparse attention are worth, measured on `recall`.

    python bench.py recipe              # one seed, 5 minutes
    python bench.py recipe --seeds 3    # three seeds, as many at a time as there are cores

A prompt is a long table of "key=51;" and a question about one key, so that a model must find one
place among many. The same model is examined with dense attention; with an indexer that nobody
trained; with mean keys instead of an indexer; after the indexer's warm-up; after the whole recipe,
which trains the model, too; and with dense attention again. All but dense attention attend to
`chunk_size * top_k` keys, whatever the length of the prompt.
The text to learn from: the table of one problem (never a held-out one), then many questions about
it instead of one; the loss is on the answers. Tables begin with two pairs and double whenever nine
answers in ten are right: long tables alone do not teach the matching of keys within minutes. Every
accuracy is measured on the real sparse path.
Left out: the stages before RL (pretrain.py).

Axes: B texts · T tokens of each · A answers of a text, of m tokens each · V' tokens of the alphabet
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lab.plots import between, column, save_result, table
from model import GPT, ModelConfig, attend_packed, pack_tokens
from pretrain import (
    Stages,
    answer,
    make_optimizers,
    train_stage,
    train_step,
    with_indexer,
)
from reward import Task, alphabet_of, make_task
from runtime.config import flag, require
from runtime.devices import cores

MULTIPLES = (2, 4, 8, 16)  # lengths of the prompts, in attended keys


@dataclass(frozen=True)
class RecipeConfig(Stages):
    """What `python bench.py recipe` needs to know."""

    seeds: int = flag(1, "how many seeds to run, from --seed on", 1)
    grow_steps: int = flag(2000, "most steps of the dense stage while its tables grow", 1)
    problems: int = flag(512, "held-out problems of the longest length", 1)

    @property
    def attended(self) -> int:
        """Keys that a query attends to."""
        return self.chunk_size * self.top_k

    @property
    def lengths(self) -> list[int]:
        """Tokens of the prompts."""
        return [self.attended * multiple for multiple in MULTIPLES]


# ----------------------------------------------------------------------------- text, and a model


def make_text(task: Task, index: int) -> tuple:
    """A training problem's table, then "?key=51<end>" for half as many pairs, drawn with
    replacement: tokens [T], and the columns [M] of the answers."""
    table, _, _ = task.reset(index, "train")["prompt"].partition("?")
    pairs = table.rstrip(";").split(";")  # "key=51"
    count = max(1, len(pairs) // 2)
    encode, end = task.tokenizer.encode, task.tokenizer.end
    tokens, columns = encode(table), []
    for asked in np.random.default_rng(index).integers(len(pairs), size=count):
        tokens += [*encode("?" + pairs[asked]), end]
        columns += range(len(tokens) - 3, len(tokens))  # two digits and the end
    return tokens, columns


def make_batch(length: int, seed: int, start: int, budget: int) -> tuple:
    """About `budget` tokens of text on problems of recall:`length`, from problem `start` on.

    Returns int64 tokens [B, T], columns [A, m] of their answers, and the alphabet [V'] of answers.
    """
    task = make_task(f"recall:{length}", seed)
    first, columns = make_text(task, start)  # all texts of a length have the same columns
    count = max(4, budget // len(first))
    texts = [make_text(task, start + i)[0] for i in range(count)]
    alphabet = torch.from_numpy(alphabet_of(task))
    return torch.tensor(texts), torch.tensor(columns).view(-1, 3), alphabet


def recall_batches(config: RecipeConfig, seed: int, used: int) -> Iterator:
    """Texts of all lengths in turn, from problem `used` on."""
    for step in count():
        batch = make_batch(config.lengths[step % len(MULTIPLES)], seed, used, config.tokens)
        used += len(batch[0])
        yield batch


def make_recipe_model(config: RecipeConfig, seed: int) -> GPT:
    """Two layers are the least for recall: one finds the key of a value, the next compares keys."""
    shape = {"layers": 2, "width": 64, "heads": 8, "kv_heads": 4, "head_width": 16, "hidden": 128}
    rope = {"positions": "rope", "rope_base": 1000.0, "qk_norm": True}
    context = 2 * config.lengths[-1]
    return GPT(ModelConfig(**shape, **rope, **with_indexer(config), context=context), seed)


def grow(model: GPT, config: RecipeConfig, seed: int) -> int:
    """The dense stage's first part: short texts, doubled whenever nine answers in ten are right.
    Returns how many problems were used; a model that learns nothing stops at `grow_steps`."""
    length, used, right = 16, 0, 0.0
    optimizers = make_optimizers(model, config, "dense")
    for step in tqdm(range(config.grow_steps), f"seed {seed} dense, growing"):
        batch = make_batch(length, seed, used, config.tokens)
        used += len(batch[0])
        exact = train_step(model, batch, "dense", optimizers, min(1.0, step / 20))
        right = 0.9 * right + 0.1 * exact
        if right > 0.9:
            if length == config.lengths[-1]:
                break
            length, right = min(2 * length, config.lengths[-1]), 0.0
    return used


# -------------------------------------------------------------------------------------- the exam


def attention_of(model: GPT, tokens: Tensor, kind: str) -> Callable:
    """Attention of texts [B, T]: "dense", "dsa" by the indexer, or "mean" keys."""
    config = replace(model.config, attention="dense") if kind == "dense" else model.config
    attend = attend_packed(config, pack_tokens(list(tokens)))
    return attend if kind != "mean" else lambda layer, q, k, v, index: attend(layer, q, k, v, None)


def exam(length: int, problems: int) -> tuple:
    """Held-out prompts of recall:`length` with their answers, as from `make_batch`."""
    task = make_task(f"recall:{length}")
    found = [task.reset(i, "eval") for i in range(problems)]
    encode, end = task.tokenizer.encode, task.tokenizer.end
    tokens = torch.tensor([encode(p["prompt"] + p["answer"]) + [end] for p in found])
    columns = torch.arange(tokens.shape[1])[None, -3:]
    return tokens, columns, torch.from_numpy(alphabet_of(task))


@torch.no_grad()
def accuracy(model: GPT, tokens: Tensor, columns: Tensor, alphabet: Tensor, kind: str) -> float:
    """Share of the prompts of an exam that are answered exactly, with one kind of attention."""
    exact = []
    for part in tokens.split(max(1, 8192 // tokens.shape[1])):
        attend = attention_of(model, part, kind)
        exact.append(answer(model, (part, columns, alphabet), attend)[1])
    return torch.cat(exact).float().mean().item()


# ------------------------------------------------------------------------------------- the stages


def run_seed(config: RecipeConfig, seed: int) -> dict:
    """The whole recipe: every stage, and how well each variant answers."""
    torch.set_num_threads(1)
    model = make_recipe_model(config, seed)
    variants = {}
    # as many tokens of each length: on short prompts all variants are good, and close together
    total = config.problems * config.lengths[-1]
    exams = {length: exam(length, total // length) for length in config.lengths}

    def examine(variant: str, kind: str = "dsa") -> None:
        variants[variant] = {n: round(accuracy(model, *own, kind), 4) for n, own in exams.items()}

    def stage(name: str, steps: int, used: int) -> None:
        train_stage(model, config, name, steps, recall_batches(config, seed, used))

    used = grow(model, config, seed)
    stage("dense", config.dense_steps, used)
    examine("dense", "dense")
    examine("random indexer")
    examine("mean keys", "mean")
    stage("warm-up", config.warmup_steps, used + 10**6)  # problems that are new to it
    examine("warm-up only")
    stage("sparse", config.sparse_steps, used + 2 * 10**6)
    examine("full recipe")
    examine("dense, after it", "dense")  # the same weights: what selection alone costs
    return {"seed": seed, "accuracy": variants}


def recipe_lines(result: dict) -> list[str]:
    """Accuracies by variant and length, smallest to largest seed."""
    cells, found = [], column(result["runs"], "accuracy")
    keys = result["settings"]["chunk_size"] * result["settings"]["top_k"]
    for variant, lengths in found[0].items():
        for n in lengths:
            scores = [100 * scores[variant][n] for scores in found]
            cells.append((variant, f"{n} tokens, {int(n) // keys}×", between(scores, ".1f")))
    text = f"All but dense attention attend to {keys} keys.\n"
    return [text, *table("held-out prompts solved (%)", cells)]


def bench_recipe(folder: Path, config: RecipeConfig) -> None:
    """Run the seeds, as many at a time as there are cores."""
    require(config.attended >= 8, f"--top-k {config.top_k}: must attend to at least 8 keys")
    begin, runs = time.monotonic(), []
    seeds = range(config.seed, config.seed + config.seeds)
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        for run in pool.map(run_seed, [config] * len(seeds), seeds):
            runs.append(run)
            seconds = round(time.monotonic() - begin, 1)
            result = {"settings": vars(config), "wall_s": seconds, "runs": runs}
            save_result(folder, "recipe", result)
