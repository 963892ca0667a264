"""recipe.py: what the training stages of sparse attention are worth, measured on `recall`.

    python bench.py recipe              # one seed, 5 minutes: a table, a picture, the weights
    python bench.py recipe --seeds 3    # three seeds, as many at a time as there are cores

A prompt is a long table of "key=51;" and a question about one key, so that a model must find one
place among many. The same model is examined with dense attention; with an indexer that nobody
trained; with mean keys instead of an indexer; after the indexer's warm-up; after the whole recipe;
and after some steps of RL with the indexer frozen. All of them but the first attend to
`chunk_size * top_k` keys, whatever the length of the prompt.
Left out: the stages themselves (pretrain.py).
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import dsa
from lab.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, between, draw_panels, markdown, save_result
from learner import Learner, learner_step, new_groups
from losses import Damper
from model import GPT, Packed, attend_packed, dense_packed, pack_tokens
from pretrain import RecipeConfig, grow, make_recipe_model, parts_of, train_stage, watched_attention
from reward import alphabet_of, make_task, verify_group
from rollout import generate
from runtime.config import Config, UserError
from runtime.devices import cores, describe_machine
from runtime.messages import apply_verdicts
from runtime.setup import make_generator
from runtime.tokenizer import END, encode

VARIANTS = ("dense", "random indexer", "mean keys", "warm-up only", "full recipe", "after RL")
MAPPED = ("random indexer", "warm-up only", "full recipe")  # those whose selection is looked at


def attention_of(model: GPT, packed: Packed, kind: str) -> Callable:
    """Attention of a packed forward pass: "dense", "dsa" by the indexer, or "mean" keys."""
    c = model.config
    if kind == "dense":
        return lambda layer, q, k, v, index: dense_packed(q, k, v, packed)
    if kind == "dsa":
        return attend_packed(c, packed)
    tables = dsa.packed_tables(packed.cu_seqlens, c.chunk_size)
    return lambda layer, q, k, v, index: dsa.dsa_attention(q, k, v, tables, c.top_k)


def exam(length: int, problems: int) -> tuple[Tensor, Tensor]:
    """Held-out prompts of recall:`length` with their answers: tokens [P, T], alphabet [V']."""
    task = make_task(f"recall:{length}")
    found = [task.reset(i, "eval") for i in range(problems)]
    tokens = [encode(p["prompt"] + p["answer"]) + [END] for p in found]
    return torch.tensor(tokens), torch.from_numpy(alphabet_of(task))


@torch.no_grad()
def accuracy(model: GPT, tokens: Tensor, alphabet: Tensor, kind: str) -> float:
    """Share of prompts that are answered exactly, as greedy decoding would: given the right tokens
    before it, each token of the answer [P, 3] is the most probable one of the alphabet."""
    exact = []
    for part in tokens.split(max(1, 8192 // tokens.shape[1])):
        packed = pack_tokens(list(part[:, :-1]))
        attend = attention_of(model, packed, kind)
        hidden = model.body(packed.tokens, packed.positions, attend)
        best = model.logits(hidden.view(len(part), -1, model.config.width)[:, -3:], alphabet)
        exact.append((alphabet[best.argmax(-1)] == part[:, -3:]).all(-1))
    return float(torch.cat(exact).float().mean())


@torch.no_grad()
def mass_recall(model: GPT, tokens: Tensor) -> dict[str, float]:
    """Share of the dense attention that lies on what the indexer selects, and on the best selection
    of as many chunks: the mean over heads, layers and the two queries that ask for a digit."""
    sums = {"indexer": 0.0, "best": 0.0}
    for part in tokens[:, :-2].split(32):
        (B, T), seen = part.shape, []
        attend = watched_attention(model.config, B, T, False, seen)
        model.body(part.flatten(), torch.arange(T).repeat(B), attend)
        for scores, selected, mass in seen:
            own = (scores > -torch.inf).sum(-1)  # [N], place of a query's own chunk
            ideal = mass.scatter(1, own[:, None], 2.0)  # which is always selected
            ideal = ideal.topk(min(model.config.top_k, ideal.shape[1])).indices
            shares = {"indexer": (mass * selected).sum(-1), "best": mass.gather(1, ideal).sum(-1)}
            for name, share in shares.items():
                sums[name] += float(share.view(B, T)[:, -2:].mean(1).sum())
    return {name: round(s / len(tokens) / model.config.layers, 4) for name, s in sums.items()}


def reinforce(model: GPT, config: RecipeConfig, seed: int) -> list[float]:
    """A few steps of train_sync.py on prompts of 8 times the attended keys; no gradient reaches
    the indexer. Returns the mean reward of each step."""
    how = Config(task=f"recall:{config.lengths[2]}", seed=seed, steps=config.rl_steps)
    how = dataclasses.replace(how, groups_per_step=8, slots=32, lr=1e-4, reference_every=0)
    task = make_task(how.task, seed)
    flat = torch.nn.Parameter(model.flat)
    flat.grad, alphabet = model.flat_grad, torch.from_numpy(alphabet_of(task))
    learner = Learner(model, torch.optim.AdamW([flat], weight_decay=0.0), Damper(), alphabet)
    generator, rewards = make_generator(how, task, model), []
    before = [p.clone() for p in parts_of(model)["indexer"]]
    for _ in tqdm(range(how.steps), f"seed {seed} RL"):
        generator.set_weights(learner.version, None)
        groups = generate(generator, new_groups(learner, task, how.groups_per_step))
        for group in groups:
            apply_verdicts(group, verify_group(group, task, how))
        learner_step(learner, groups, how)
        episodes = [t.reward for group in groups for t in group.trajectories]
        rewards.append(round(float(np.mean(episodes)), 4))
    assert all(map(torch.equal, before, parts_of(model)["indexer"])), "RL moved the indexer"
    return rewards


def run_seed(config: RecipeConfig, seed: int, folder: Path) -> dict:
    """The whole recipe: every stage, what it takes, and how well each variant answers."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    begin, model = time.monotonic(), make_recipe_model(config, seed)
    result = {"seed": seed, "stages": {}, "accuracy": {}, "mass": {}}
    # as many tokens of each length: on short prompts all variants are good, and close together
    total = config.problems * config.lengths[-1]
    exams = {length: exam(length, total // length) for length in config.lengths}

    def examine(variant: str, kind: str = "dsa") -> None:
        rows = {}
        for length in tqdm(exams, f"seed {seed} {variant}", leave=False):
            rows[length] = round(accuracy(model, *exams[length], kind), 4)
        result["accuracy"][variant] = rows
        if variant in MAPPED:
            result["mass"][variant] = {n: mass_recall(model, exams[n][0][:64]) for n in exams}

    def stage(name: str, steps: int, used: int) -> None:
        result["stages"][name] = train_stage(model, config, seed, name, steps, used)
        weights = {"shape": model.config.__dict__, "weights": model.flat.cpu()}
        torch.save(weights, folder / f"{name}.pt")

    _, used = result["stages"]["growing"] = grow(model, config, seed)
    stage("dense", config.dense_steps, used)
    examine("dense", "dense")
    examine("random indexer")
    examine("mean keys", "mean")
    stage("warm-up", config.warmup_steps, used + 10**6)  # problems that are new to it
    examine("warm-up only")
    stage("sparse", config.sparse_steps, used + 2 * 10**6)
    examine("full recipe")
    if config.rl_steps:
        result["stages"]["RL"] = reinforce(model, config, seed)
        examine("after RL")
    return result | {"seconds": round(time.monotonic() - begin, 1)}


def accuracy_table(runs: list[dict], lengths: list[int], attended: int) -> list[str]:
    """Accuracies by variant and length, smallest to largest seed."""
    head = ["held-out prompts solved (%)", *(f"{n} tokens, {n // attended}×" for n in lengths)]
    rows = []
    for variant in runs[0]["accuracy"]:
        cells = []
        for n in lengths:
            cells.append(between([100 * run["accuracy"][variant][n] for run in runs], ".1f"))
        rows.append([variant, *cells])
    return markdown(head, rows)


def verdict(runs: list[dict], lengths: list[int]) -> dict[str, bool | str]:
    """What the recipe has to show, in every seed: the order of the variants on prompts of at least
    4 times the attended keys, and at 8 times no more than one point lost against dense."""
    orders, losses = [], []
    for run in runs:
        scores = run["accuracy"]
        for n in lengths[1:]:
            orders.append([scores[variant][n] for variant in MAPPED])
        losses.append(scores["dense"][lengths[2]] - scores["full recipe"][lengths[2]])
    strict = sum(a < b < c for a, b, c in orders)
    return {
        "random < warm-up only < full": f"in {strict} of {len(orders)} (seed, length)",
        "never the other way round": all(a < b <= c for a, b, c in orders),
        "full within 1 point of dense at 8x": max(losses) < 0.0101,
    }


def draw_recipe(runs: list[dict], config: RecipeConfig, folder: Path) -> None:
    """recipe.png: accuracy, and the attention mass that is selected, against the prompt's length;
    means over the seeds."""
    styles = (GREY + "o--", PURPLE + "o-", GREY + "o-", ORANGE + "o-", BLUE + "o-", GREEN + "o-")
    styles = dict(zip(VARIANTS, styles, strict=True))

    def curve(style: str, rows: list[list[float]]) -> tuple:
        return style, config.lengths, 100 * np.mean(rows, axis=0)

    solved, mass = {}, {}
    for variant in runs[0]["accuracy"]:
        rows = [list(run["accuracy"][variant].values()) for run in runs]
        solved[variant] = curve(styles[variant], rows)
    for name, variant, who in (*((v, v, "indexer") for v in MAPPED), ("best", MAPPED[1], "best")):
        rows = [[row[who] for row in run["mass"][variant].values()] for run in runs]
        mass[name] = curve(styles["dense" if who == "best" else variant], rows)
    axes = {"xscale": "log", "xticks": config.lengths, "xticklabels": config.lengths}
    axes |= {"xlabel": "tokens of the prompt", "ylim": (-3, 103)}
    panels = [(solved, axes | {"ylabel": "held-out prompts solved (%)"})]
    panels.append((mass, axes | {"ylabel": "attention mass of the answer selected (%)"}))
    title = f"{config.attended} attended keys, dense attention excepted"
    draw_panels(folder, "recipe", title, panels, (9, 4))


def bench_recipe(folder: Path, config: RecipeConfig) -> None:
    """Run the seeds, as many at a time as there are cores; save, draw and print."""
    if config.attended < 8:
        raise UserError(f"--top-k {config.top_k}: must attend to at least 8 keys")
    begin, seeds = time.monotonic(), range(config.seed, config.seed + config.seeds)
    places = [folder / f"seed{seed}" for seed in seeds]
    workers = min(len(seeds), cores())
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        runs = list(pool.map(run_seed, [config] * len(seeds), seeds, places))
    table = "\n".join(accuracy_table(runs, config.lengths, config.attended))
    shown = verdict(runs, config.lengths)
    result = {"machine": describe_machine(), "settings": dataclasses.asdict(config)}
    result |= {"wall_s": round(time.monotonic() - begin, 1), "table": table, "shown": shown}
    save_result(folder, "recipe", result | {"runs": runs})
    draw_recipe(runs, config, folder)
    print(table)
    for name, held in shown.items():
        print(f"{name}: {held}")
