"""recipe.py: what the training stages of sparse attention are worth, measured on `recall`.

    python recipe.py                # one seed, some minutes: a table, a picture, the weights
    python recipe.py --seeds 3      # three seeds -> results/recipe.json and recipe.png, too

A prompt is a long table of "key=51;" and a question about one key, so that a model must find one
place among many. The same model is examined with dense attention; with an indexer that nobody
trained; with mean keys instead of an indexer; after the indexer's warm-up; after the whole recipe;
and after some steps of RL with the indexer frozen (pretrain.py describes the stages). All of them
but the first attend to `chunk_size * top_k` keys, whatever the length of the prompt.
Left out: the stages themselves (pretrain.py).
"""

import dataclasses
import json
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
from lab.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RESULTS, canvas, save_result
from learner import Learner, learner_step, new_groups
from losses import Damper
from model import GPT, Packed, attend_packed, dense_packed, pack_tokens
from pretrain import Settings, grow, make_model, parts_of, train, watched_attention
from reward import LIMITS, make_task, score
from rollout import alphabet_of, generate
from runtime.config import Config, UserError, run_main
from runtime.devices import cores, describe_machine
from runtime.messages import apply_verdicts
from runtime.setup import make_generator
from runtime.tokenizer import END, encode

VARIANTS = ("dense", "random indexer", "mean keys", "warm-up only", "full recipe", "after RL")


MAPPED = ("random indexer", "warm-up only", "full recipe")  # with mass and map


def attention_of(model: GPT, packed: Packed, kind: str) -> Callable:
    """Attention of a packed forward pass: "dense", "dsa" by the indexer, or "mean" keys."""
    c = model.config
    if kind == "dense":
        return lambda q, k, v, index: dense_packed(q, k, v, packed)
    if kind == "dsa":
        return attend_packed(c, packed)
    tables = dsa.packed_tables(packed.cu_seqlens, c.chunk_size)
    return lambda q, k, v, index: dsa.dsa_attention(q, k, v, tables, c.top_k)


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
        attends = [attention_of(model, packed, kind)] * model.config.layers
        hidden = model.body(packed.tokens, packed.positions, attends)
        best = model.logits(hidden.view(len(part), -1, model.config.width)[:, -3:], alphabet)
        exact.append((alphabet[best.argmax(-1)] == part[:, -3:]).all(-1))
    return float(torch.cat(exact).float().mean())


@torch.no_grad()
def mass_recall(model: GPT, tokens: Tensor) -> dict[str, float]:
    """Share of the dense attention probability that lies on what the indexer selects, mean over
    heads, layers and queries (all, or the two that ask for a digit), and what the best selection
    of as many chunks would have. Attention itself stays dense."""
    sums = {}
    for part in tokens[:, :-2].split(32):
        (B, T), seen = part.shape, []
        attend = watched_attention(model.config, B, T, False, seen)
        attends = [attend] * model.config.layers
        model.body(part.flatten(), torch.arange(T).repeat(B), attends)
        for scores, selected, mass in seen:
            own = (scores > -torch.inf).sum(-1)  # [N] place of a query's own chunk
            ideal = mass.scatter(1, own[:, None], 2.0)
            ideal = ideal.topk(min(model.config.top_k, ideal.shape[1])).indices
            shares = [(mass * selected).sum(-1), mass.gather(1, ideal).sum(-1)]
            for name, share in zip(("indexer", "best"), shares, strict=True):
                share = share.view(B, T)
                for which, value in (("all", share), ("answer", share[:, -2:])):
                    key = f"{name}, {which} queries"
                    sums[key] = sums.get(key, 0.0) + float(value.mean(1).sum())
    return {key: round(value / len(tokens) / len(attends), 4) for key, value in sums.items()}


@torch.no_grad()
def selection_map(model: GPT, tokens: Tensor) -> dict:
    """For the last layer and the query that asks for the first digit of an answer [T]: its dense
    attention mass by chunk, and the chunks the indexer selects."""
    seen: list = []
    attend = watched_attention(model.config, 1, len(tokens) - 3, False, seen)
    attends = [attend] * model.config.layers
    model.body(tokens[:-3], torch.arange(len(tokens) - 3), attends)
    _, selected, mass = seen[-1]
    asked = int((tokens[:-5] == tokens[-5]).nonzero()[0])  # the key's place in the table
    return {
        "mass": [round(x, 4) for x in mass[-1].tolist()],
        "selected": selected[-1].nonzero()[:, 0].tolist(),
        "asked": [asked // model.config.chunk_size, (asked + 3) // model.config.chunk_size],
    }


def reinforce(model: GPT, settings: Settings, seed: int) -> list[float]:
    """A few steps of train_sync.py on prompts of 8 times the attended keys; no gradient reaches
    the indexer. Returns the mean reward of each step."""
    config = Config(task=f"recall:{settings.lengths[2]}", seed=seed, steps=settings.rl_steps)
    config = dataclasses.replace(config, groups_per_step=8, slots=32, lr=1e-4, reference_every=0)
    task = make_task(config.task, seed)
    flat = torch.nn.Parameter(model.flat)
    flat.grad, alphabet = model.flat_grad, torch.from_numpy(alphabet_of(task))
    learner = Learner(model, torch.optim.AdamW([flat], weight_decay=0.0), Damper(), alphabet)
    generator, rewards = make_generator(config, task, model), []
    before = [p.clone() for p in parts_of(model)["indexer"]]
    for _ in tqdm(range(config.steps), f"seed {seed} RL"):
        generator.set_weights(learner.version, None)
        groups = generate(generator, new_groups(learner, task, config.groups_per_step))
        for group in groups:
            apply_verdicts(group, score(group, task, config))
        rewards.append(round(learner_step(learner, groups, config)["reward"], 4))
    assert all(map(torch.equal, before, parts_of(model)["indexer"])), "RL moved the indexer"
    return rewards


def run_seed(settings: Settings, seed: int, folder: Path) -> dict:
    """The whole recipe: every stage, what it takes, and how well each variant answers."""
    torch.set_num_threads(1)
    folder.mkdir()
    model, result = make_model(settings, seed), {"seed": seed, "seconds": {}, "stages": {}}
    result |= {"accuracy": {}, "mass": {}, "map": {}}
    # as many tokens of each length: on short prompts all variants are good, and close together
    total = settings.problems * settings.lengths[-1]
    exams = {length: exam(length, total // length) for length in settings.lengths}

    def timed(name: str, function: Callable, *arguments):
        begin = time.monotonic()
        result["stages"][name] = function(*arguments)
        result["seconds"][name] = round(time.monotonic() - begin, 1)
        return result["stages"][name]

    def measure(variant: str, kind: str = "dsa") -> None:
        rows = {
            n: round(accuracy(model, *exams[n], kind), 4)
            for n in tqdm(exams, f"seed {result['seed']} {variant}", leave=False)
        }
        result["accuracy"][variant] = rows
        if variant in MAPPED:
            result["mass"][variant] = {n: mass_recall(model, exams[n][0][:64]) for n in exams}
            result["map"][variant] = selection_map(model, exams[settings.lengths[1]][0][0])

    def save(stage: str) -> None:
        weights = {"shape": model.config.__dict__, "weights": model.flat.cpu()}
        torch.save(weights, folder / f"{stage}.pt")

    steps, used = timed("growing", grow, model, settings, seed)
    timed("dense", train, model, settings, seed, "dense", settings.dense_steps, used)
    save("dense")
    for variant, kind in (("dense", "dense"), ("random indexer", "dsa"), ("mean keys", "mean")):
        timed(f"measure {variant}", measure, variant, kind)
    used += 10**6
    timed("warm-up", train, model, settings, seed, "warm-up", settings.warmup_steps, used)
    save("warmup")
    timed("measure warm-up", measure, "warm-up only")
    used += 10**6
    timed("sparse", train, model, settings, seed, "sparse", settings.sparse_steps, used)
    save("full")
    timed("measure full", measure, "full recipe")
    if settings.rl_steps:
        timed("RL", reinforce, model, settings, seed)
        timed("measure RL", measure, "after RL")
    return result


def table(runs: list[dict], lengths: list[int], attended: int) -> str:
    """Accuracies by variant and length, smallest to largest seed, as a Markdown table."""
    heads = [f" {n} tokens, {n // attended}× |" for n in lengths]
    lines = ["| held-out prompts solved (%) |" + "".join(heads), "|---" * (len(lengths) + 1) + "|"]
    for variant in runs[0]["accuracy"]:
        cells = []
        for n in lengths:
            values = sorted({r["accuracy"][variant][n] for r in runs})
            ends = dict.fromkeys((values[0], values[-1]))
            cells.append(" to ".join(f"{100 * x:.1f}" for x in ends))
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(runs: list[dict], lengths: list[int]) -> dict[str, bool | str]:
    """What the recipe has to show, in every seed: the order of the variants on prompts of at least
    4 times the attended keys, and at 8 times no more than one point lost against dense."""
    variants = ("random indexer", "warm-up only", "full recipe")
    cells = [[r["accuracy"][v][n] for v in variants] for r in runs for n in lengths[1:]]
    strict = sum(a < b < c for a, b, c in cells)
    n = lengths[2]
    losses = [r["accuracy"]["dense"][n] - r["accuracy"]["full recipe"][n] for r in runs]
    return {
        "random < warm-up only < full": f"in {strict} of {len(cells)} (seed, length)",
        "never the other way round": all(a < b <= c for a, b, c in cells),
        "full within 1 point of dense at 8x": max(losses) < 0.0101,
    }


def draw(runs: list[dict], settings: Settings, path: Path) -> None:
    """Accuracy and attention mass against length, and one prompt's selection."""
    plt, attended = canvas(), settings.chunk_size * settings.top_k
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    colours = ("black", PURPLE, GREY, ORANGE, BLUE, GREEN)
    colours = dict(zip(VARIANTS, colours, strict=True))
    x = settings.lengths

    def band(axis, rows: list[list[float]], label: str, **style) -> None:
        values = 100 * np.array(rows)  # [seeds, lengths]
        axis.plot(x, values.mean(0), marker="o", ms=4, label=label, **style)
        axis.fill_between(x, values.min(0), values.max(0), alpha=0.12, color=style["color"])

    for variant in runs[0]["accuracy"]:
        rows = [list(r["accuracy"][variant].values()) for r in runs]
        band(axes[0], rows, variant, color=colours[variant], ls="--" if variant == "dense" else "-")
    for variant in MAPPED:
        rows = [[m["indexer, answer queries"] for m in r["mass"][variant].values()] for r in runs]
        band(axes[1], rows, variant, color=colours[variant])
    rows = [[m["best, answer queries"] for m in r["mass"][MAPPED[1]].values()] for r in runs]
    band(axes[1], rows, "best possible", color=GREY, ls="--")
    titles = ("Held-out prompts solved (%)", "Attention mass of the answer that is selected (%)")
    for axis, title in zip(axes[:2], titles, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [f"{n}\n({n // attended}x)" for n in x])
        axis.set_xlabel(f"prompt tokens (multiple of the {attended} attended keys)")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.set_ylim(-3, 103)
        axis.legend(fontsize=8, loc="lower left" if axis is axes[1] else "center")
    shown, width = runs[0]["map"], 0.9
    top = max(shown["full recipe"]["mass"])
    for row, variant in enumerate(MAPPED):
        mass = 0.8 * np.array(shown[variant]["mass"]) / top
        axes[2].bar(range(len(mass)), mass, width, bottom=row, color="#dddddd")
        picked = shown[variant]["selected"]
        axes[2].bar(picked, mass[picked] + 0.03, width, bottom=row, color=colours[variant])
    first, last = shown["full recipe"]["asked"]
    axes[2].axvspan(first - 0.5, last + 0.5, color=GREEN, alpha=0.25)
    names = [variant.replace(" ", "\n") for variant in MAPPED]
    axes[2].set_yticks([row + 0.4 for row in range(3)], names, fontsize=9)
    axes[2].set_xlabel("token of one prompt (green: the pair that is asked for)")
    axes[2].set_title("Last layer's mass; coloured: selected")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(settings: Settings) -> None:
    """Run the seeds, as many at a time as there are cores; print, draw and save."""
    if settings.lengths[0] < LIMITS["recall"][0]:
        raise UserError(f"--top-k {settings.top_k}: must attend to at least 8 keys")
    folder = Path(settings.out or f"runs/recipe-{time.strftime('%m%d-%H%M%S')}")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out {folder}: must be new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    begin, seeds = time.monotonic(), range(settings.seed, settings.seed + settings.seeds)
    places = [folder / f"seed{seed}" for seed in seeds]
    workers = min(len(seeds), cores())
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        runs = list(pool.map(run_seed, [settings] * len(seeds), seeds, places))
    lengths = settings.lengths
    text, shown = table(runs, lengths, settings.chunk_size * settings.top_k), verdict(runs, lengths)
    result = {"machine": describe_machine(), "settings": dataclasses.asdict(settings)}
    result |= {"wall_s": round(time.monotonic() - begin, 1), "table": text, "shown": shown}
    (folder / "recipe.json").write_text(json.dumps(result | {"runs": runs}, indent=1))
    draw(runs, settings, folder / "recipe.png")
    if settings.seeds > 1:
        save_result("recipe", result | {"runs": runs})
        draw(runs, settings, RESULTS / "recipe.png")
    print(text)
    words = {True: "yes", False: "NO"}
    print("; ".join(f"{name}: {words.get(held, held)}" for name, held in shown.items()))
    print(f"{result['wall_s']:.0f} s; weights and picture in {folder}")


if __name__ == "__main__":
    run_main(main, __doc__, Settings)
