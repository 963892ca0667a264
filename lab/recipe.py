"""recipe.py: what the training stages of sparse attention are worth, measured on `recall`.

    python bench.py recipe              # one seed, 5 minutes
    python bench.py recipe --seeds 3    # three seeds, as many at a time as there are cores

A prompt is a long table of "key=51;" and a question about one key, so that a model must find one
place among many. The same model is examined with dense attention; with an indexer that nobody
trained; with mean keys instead of an indexer; after the indexer's warm-up; after the whole recipe,
which trains the model, too, with dense attention again; and after some steps of RL with the indexer
frozen. All but dense attention attend to `chunk_size * top_k` keys, whatever the length of the
prompt.
Left out: the stages before RL (pretrain.py).
"""

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from lab.plots import between, markdown, save_result
from lab.stale import judged
from learner import learner_step, make_learner, new_groups
from model import GPT
from pretrain import (
    RecipeConfig,
    accuracy,
    exam,
    grow,
    make_recipe_model,
    parts_of,
    recall_batches,
    train_stage,
)
from reward import make_task
from rollout import make_generator
from runtime.config import Config, require
from runtime.devices import cores
from runtime.pictures import column

STAGED = ("random indexer", "warm-up only", "full recipe")  # each better than the one before


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
    if config.rl_steps:
        rl_stage(model, config, seed)
        examine("after RL")
    return {"seed": seed, "accuracy": variants}


def rl_stage(model: GPT, config: RecipeConfig, seed: int) -> None:
    """A few steps of train_sync.py on prompts of 8 times the attended keys; no gradient reaches
    the indexer."""
    sizes = {"steps": config.rl_steps, "groups_per_step": 8, "slots": 32}
    how = Config(task=f"recall:{config.lengths[2]}", seed=seed, lr=1e-4, reference_every=0, **sizes)
    task = make_task(how.task, seed)
    learner = make_learner(how, task, model)
    generator = make_generator(how, task, model)
    before = [p.clone() for p in parts_of(model)["indexer"]]
    for _ in tqdm(range(how.steps), f"seed {seed} RL"):
        generator.set_weights(learner.version, model.flat)
        groups = judged(generator, new_groups(learner, task, how.groups_per_step), task, how)
        learner_step(learner, groups, how)
    assert all(map(torch.equal, before, parts_of(model)["indexer"])), "RL moved the indexer"


def recipe_lines(result: dict) -> list[str]:
    """Accuracies by variant and length, smallest to largest seed."""
    found = column(result["runs"], "accuracy")
    keys = result["settings"]["chunk_size"] * result["settings"]["top_k"]
    lengths = found[0]["dense"]
    head = ["held-out prompts solved (%)", *(f"{n} tokens, {int(n) // keys}×" for n in lengths)]
    rows = []
    for variant in found[0]:
        scores = column(found, variant)
        solved = [between([100 * score[n] for score in scores], ".1f") for n in lengths]
        rows.append([variant, *solved])
    text = f"All but dense attention attend to {keys} keys.\n"
    return [text, *markdown(head, rows)]


def verdict(runs: list[dict], lengths: list[int]) -> dict[str, bool | str]:
    """What the recipe has to show, in every seed: the order of the variants at every length, and at
    8 times the attended keys no more than one point lost against dense, before the sparse stage or
    after it."""
    orders, losses = [], []
    for scores in column(runs, "accuracy"):
        orders += [[scores[variant][n] for variant in STAGED] for n in lengths]
        dense = max(scores[name][lengths[2]] for name in ("dense", "dense, after it"))
        losses.append(dense - scores["full recipe"][lengths[2]])
    strict = sum(a < b < c for a, b, c in orders)
    return {
        "random < warm-up only < full": f"in {strict} of {len(orders)} (seed, length)",
        "never the other way round": all(a < b <= c for a, b, c in orders),
        "full within 1 point of dense at 8x": max(losses) < 0.0101,
    }


def bench_recipe(folder: Path, config: RecipeConfig) -> None:
    """Run the seeds, as many at a time as there are cores; save and print."""
    require(config.attended >= 8, f"--top-k {config.top_k}: must attend to at least 8 keys")
    begin, runs = time.monotonic(), []
    seeds = range(config.seed, config.seed + config.seeds)
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        for run in pool.map(run_seed, [config] * len(seeds), seeds):
            runs.append(run)
            shown, seconds = verdict(runs, config.lengths), round(time.monotonic() - begin, 1)
            result = {"settings": vars(config), "wall_s": seconds, "shown": shown, "runs": runs}
            save_result(folder, "recipe", result)
    print(shown)
