"""bench.py: pictures of runs and benchmarks; every number in the README comes from here.

    python bench.py plot RUN [RUN ...]      # redraw a run's pictures, or compare several
    python bench.py tasks                   # what the README promises of train_async.py
    python bench.py staleness               # every staleness bound with every swap mode
    python bench.py generator               # decode speed beside transformers (pip install it)
    python bench.py readme                  # write results/*.json into the README's tables

Left out: training itself (the trainers are run as commands, exactly as a user would).
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

import common

RESULTS = Path(__file__).parent / "results"
# colour-blind safe (Okabe & Ito, 2008)
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"


def summarise(run: Path, facts: dict) -> str:
    """Write summary.json from a run's metrics and `facts`, draw its pictures; returns the verdict.

    The verdict has three lines: before and after, what it took, where the files are.
    """
    rows = common.read_lines(run / "metrics.jsonl")
    before, *_, after = [row["eval"] for row in rows if "eval" in row] * 2
    steps = [row for row in rows if "seconds" in row]
    total = {key: sum(row[key] for row in steps) for key in ("samples", "tokens", "seconds")}
    age = {
        "max": max((row["staleness_max"] for row in steps), default=0),
        "mean": float(np.mean([row["staleness_mean"] for row in steps] or [0.0])),
        "bound": facts.pop("staleness_bound"),
    }
    summary = {
        **facts,
        "eval_metric": "share of evaluation problems solved by greedy decoding",
        "eval_before": before["solved"],
        "eval_after": after["solved"],
        "eval": {"before": before, "after": after},
        "samples": total["samples"],
        "tokens_trained": int(total["tokens"]),
        "learner_tokens_per_s": round(total["tokens"] / max(total["seconds"], 1e-9)),
        "reference_share": float(np.mean([row["reference_share"] for row in steps] or [0.0])),
        "staleness": age,
        "failures": dict(sum((Counter(row["failures"]) for row in steps), Counter())),
        "machine": common.describe_machine(),
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1))
    draw_run(run)
    return (
        f"solved {before['solved']:.0%} -> {after['solved']:.0%} of the evaluation problems, "
        f"reward {before['reward']:.2f} -> {after['reward']:.2f}, {after['turns']:.2f} turns\n"
        f"{summary['steps']} steps, {summary['samples']:,} episodes in {summary['wall_s']:.0f} s; "
        f"staleness mean {age['mean']:.2f}, max {age['max']} (bound {age['bound']})\n"
        f"{run}/ has reward.png, timeline.png, summary.json, metrics.jsonl, events.jsonl"
    )


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of one run folder, from its metrics and events."""
    draw_reward(run)
    draw_timeline(run)


def canvas():
    """matplotlib.pyplot without a screen; imported late, because a worker never draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_reward(run: Path) -> None:
    """Reward, held-out score and staleness against wall-clock time."""
    plt = canvas()
    rows = common.read_lines(run / "metrics.jsonl")
    steps = [r for r in rows if "reward" in r]
    if not steps:
        return
    t = [r["t"] for r in steps]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    top.plot(t, [r["reward"] for r in steps], color=BLUE, lw=1, label="training reward (mean)")
    held = [(r["t"], r["eval"]["solved"]) for r in rows if "eval" in r]
    top.plot(
        *zip(*held, strict=True), "o-", color=ORANGE, ms=4, label="evaluation: solved (greedy)"
    )
    top.set_ylabel("score (1 = best)")
    top.set_ylim(-0.02, 1.05)
    top.legend(loc="lower right")
    config = json.loads((run / "config.json").read_text())
    top.set_title(f"{config['task']}, {config['mode']}: it learns while it generates")
    age = [r["staleness_mean"] for r in steps]
    bottom.plot(t, age, color=GREEN, lw=1, label="mean")
    bottom.plot(t, [r["staleness_max"] for r in steps], color=PURPLE, lw=1, label="oldest token")
    bottom.set_ylabel("staleness\n(versions)")
    bottom.set_xlabel("wall-clock time (s)")
    bottom.set_ylim(-0.1, 1.5 * max(1, max(r["staleness_max"] for r in steps)))
    bottom.legend(loc="upper right", ncol=2, fontsize=8)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(run / "reward.png", dpi=120)
    plt.close(figure)


def draw_timeline(run: Path, steps: int = 8) -> None:
    """A Gantt picture of a few learner steps in the middle of a run: who did what, when, and by
    which policy version."""
    spans = [e for e in common.read_lines(run / "events.jsonl") if "seconds" in e]
    trained = [e for e in spans if e["kind"] == "train"]
    if not trained:
        return
    plt = canvas()
    first = max(0, (len(trained) - steps) // 2)
    window = trained[first : first + steps]
    left, right = window[0]["t"], window[-1]["t"] + window[-1]["seconds"]
    low, high = window[0]["version"], window[-1]["version"]
    rows = sorted({e["process"] for e in spans})
    seen = [e for e in spans if e["t"] < right and e["t"] + e["seconds"] > left]
    figure, axis = plt.subplots(figsize=(8, 1.4 + 0.5 * len(rows)), layout="constrained")
    colours = plt.get_cmap("cividis", high - low + 3)
    norm = plt.matplotlib.colors.BoundaryNorm(np.arange(low - 2, high + 2) - 0.5, colours.N)
    for e in seen:
        y, start = rows.index(e["process"]), max(e["t"], left)
        width = min(e["t"] + e["seconds"], right) - start
        colour = colours(norm(e["version"])) if "version" in e else GREY
        axis.barh(y, width * 1e3, left=(start - left) * 1e3, color=colour, height=0.7)
        if e["kind"] == "train" and width > 0.04 * (right - left):
            middle = (start - left + width / 2) * 1e3
            white = norm(e["version"]) < colours.N / 2
            axis.text(
                middle,
                y,
                f"v{e['version']}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if white else "black",
            )
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.set_xlim(0, (right - left) * 1e3)
    axis.set_xlabel(f"time (ms) since {left:.1f} s after the start; blank = idle, grey = verifying")
    config = json.loads((run / "config.json").read_text())
    axis.set_title(f"{config['task']}, {config['mode']}: who works, and with which policy version")
    scale = plt.cm.ScalarMappable(norm, colours)
    figure.colorbar(scale, ax=axis, label="policy version", ticks=range(low, high + 1, 2))
    figure.savefig(run / "timeline.png", dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------------------------- generator


def our_speed(model, prompts: list[list[int]], lengths: list[int], slots: int) -> float:
    """Useful tokens per second of this project's generator; lengths are forced, tokens sampled."""
    from buffer import Group
    from rollout import Environment, Generator, generate

    environment = Environment(
        encode_prompt=lambda problem: problem["tokens"],
        respond=None,  # never asked: an episode is one turn
        alphabet=np.arange(model.config.vocab_size),
        stop=frozenset(),
        turn_tokens=model.config.context,
        max_turns=1,
    )
    generator = Generator(model, environment, slots, model.config.context, 1)
    pairs = enumerate(zip(prompts, lengths, strict=True))
    groups = [Group(i, 0, {"tokens": p, "turn_tokens": n}) for i, (p, n) in pairs]
    start = time.perf_counter()
    episodes = generate(generator, groups)
    seconds = time.perf_counter() - start
    assert [int(g.trajectories[0].loss_mask.sum()) for g in episodes] == lengths
    return sum(lengths) / seconds


def their_speed(model, prompts: list[list[int]], lengths: list[int], slots: int) -> float:
    """Useful tokens per second of transformers' `generate`: batches of `slots` rows, padded on the
    left, each of which runs until its longest answer is done (as `generate` does with an end
    token); tokens behind a row's own end do not count."""
    import torch

    start = time.perf_counter()
    for i in range(0, len(prompts), slots):
        rows, longest = prompts[i : i + slots], max(lengths[i : i + slots])
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        options = {"do_sample": True, "min_new_tokens": longest, "max_new_tokens": longest}
        out = model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        assert out.shape[1] == width + longest
    return sum(lengths) / (time.perf_counter() - start)


def bench_generator(rounds: int = 5, slots: int = 64) -> None:
    """Decode speed on one CPU thread, model `small`: this generator beside transformers' `generate`
    for a Qwen3 configuration of the same shape, A B A B in one run -> results/generator.json."""
    import torch

    import reward
    from model import GPT, PRESETS, ModelConfig

    torch.set_num_threads(1)
    try:
        import transformers
    except ImportError:
        common.fail(ValueError("generator: needs the package transformers (pip install it)"))
    shape = ModelConfig(
        **PRESETS["small"], context=512, positions="rope", qk_norm=True, init_std=0.02
    )
    ours = GPT(shape)
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.width,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_width,
            max_position_embeddings=shape.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    same_size = ours.flat.numel() == sum(p.numel() for p in theirs.parameters())
    assert same_size, "the two models differ in size"

    task = reward.make_task("sum")
    problems = [task.reset(i, "train") for i in range(16 * slots)]
    workloads = {
        "equal lengths": ([list(range(16))] * slots, [128] * slots),
        "sum, real lengths": (
            [reward.encode(p["prompt"]) for p in problems],
            [len(p["answer"]) + 1 for p in problems],
        ),
    }
    result = {"machine": common.describe_machine(), "transformers": transformers.__version__}
    result |= {"parameters": ours.flat.numel(), "slots": slots, "workloads": {}}
    for name, (prompts, lengths) in workloads.items():
        speeds: dict[str, list[float]] = {"nanoglm": [], "transformers": []}
        our_speed(ours, prompts[:slots], lengths[:slots], slots)  # warm up
        their_speed(theirs, prompts[:8], [4] * 8, slots)
        for _ in range(rounds):
            speeds["nanoglm"].append(our_speed(ours, prompts, lengths, slots))
            speeds["transformers"].append(their_speed(theirs, prompts, lengths, slots))
        ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
        result["workloads"][name] = {
            "tokens": sum(lengths),
            "longest": max(lengths),
            "tokens_per_s": {who: spread(values) for who, values in speeds.items()},
            "ratio": spread(ratios),
        }
        print(f"{name}: {json.dumps(result['workloads'][name])}", flush=True)
    save_result("generator", result)


# -------------------------------------------------------------------------- whole training runs


def run_command(trainer: str, folder: Path, **flags) -> dict:
    """Run a trainer as a user does; its summary, with `command_s`: start of the process to end."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [sys.executable, trainer, f"--out={folder}", *options]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}"
        )
    return {**json.loads((folder / "summary.json").read_text()), "command_s": round(seconds, 1)}


def bench_tasks() -> None:
    """train_async.py with default flags on each task, several seeds -> results/tasks.json, and the
    pictures of the first `guess` run."""
    seeds = {"guess": 5, "reverse": 3, "sort": 3}
    result = {"machine": common.describe_machine(), "tasks": {}}
    with tempfile.TemporaryDirectory() as place:
        plan = [(task, seed) for task, count in seeds.items() for seed in range(count)]
        for task, seed in tqdm(plan, unit="run"):
            folder = Path(place) / f"{task}-{seed}"
            summary = run_command("train_async.py", folder, task=task, seed=seed)
            row = {name: summary[name] for name in ("seed", "steps", "command_s", "samples")}
            row |= {name: summary[name] for name in ("staleness", "utilization", "groups")}
            row |= {when: summary["eval"][when] for when in ("before", "after")}
            result["tasks"].setdefault(task, []).append(row)
            tqdm.write(f"{task} {seed}: {row['after']} in {row['command_s']} s")
            if (task, seed) == ("guess", 0):
                RESULTS.mkdir(exist_ok=True)
                for picture in ("reward.png", "timeline.png"):
                    shutil.copy(folder / picture, RESULTS / f"guess_{picture}")
            save_result("tasks", result)


def bench_staleness() -> None:
    """Every bound and swap mode on the heavy-tailed `sum`: the oldest token that was trained, and
    that nothing was lost -> results/staleness.json."""
    result = {"machine": common.describe_machine(), "runs": []}
    plan = [(eta, swap) for eta in (0, 1, 2, 4, 8) for swap in ("keep", "recompute", "drain")]
    with tempfile.TemporaryDirectory() as place:
        for eta, swap in tqdm(plan, unit="run"):
            flags = {"task": "sum", "steps": 25, "groups_per_step": 8, "max_staleness": eta}
            folder = Path(place) / f"{eta}-{swap}"
            summary = run_command("train_async.py", folder, swap=swap, **flags)
            row = {"max_staleness": eta, "swap": swap, **summary["staleness"]}
            result["runs"].append(row | {"groups": summary["groups"], "steps": summary["steps"]})
            save_result("staleness", result)


def readme_tables() -> str:
    """The measured part of the README, from results/*.json; a test compares the two."""
    tasks, speed, bounds = (load_result(name) for name in ("tasks", "generator", "staleness"))
    machine = tasks["machine"]
    lines = [
        f"Machine: {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, "
        f"torch {machine['torch']}. `solved`: the number was found within 6 guesses; in the other "
        "tasks, a held-out problem was answered without a single mistake. Answers are greedy.",
        "",
        "| `train_async.py`, default flags | solved before | solved after | turns | seconds |",
        "|---|---|---|---|---|",
    ]
    for task, rows in tasks["tasks"].items():
        runs = f"`--task {task}`, {len(rows)} seeds, {rows[0]['steps']} steps"
        columns = [
            between([r["before"]["solved"] for r in rows], ".0%"),
            between([r["after"]["solved"] for r in rows], ".1%"),
            between([r["after"]["turns"] for r in rows], ".2f"),
            between([r["command_s"] for r in rows], ".0f"),
        ]
        lines.append(f"| {runs} | {' | '.join(columns)} |")
    worst = {
        eta: max(r["max"] for r in bounds["runs"] if r["max_staleness"] == eta)
        for eta in sorted({r["max_staleness"] for r in bounds["runs"]})
    }
    lost = sum(r["groups"]["admitted"] - r["groups"]["trained"] for r in bounds["runs"])
    oldest = ", ".join(f"{worst[eta]} (bound {eta})" for eta in worst)
    lines += [
        "",
        f"Oldest token ever trained, in versions, over all three swap modes: {oldest}; "
        f"{lost} of {sum(r['groups']['admitted'] for r in bounds['runs'])} groups lost or dropped.",
        "",
        f"| decode on one CPU thread, {speed['parameters'] / 1e6:.2f}M parameters, "
        f"{speed['slots']} slots | tokens/s | transformers {speed['transformers']} | ratio |",
        "|---|---|---|---|",
    ]
    for name, row in speed["workloads"].items():
        ours, theirs = (row["tokens_per_s"][who]["median"] for who in ("nanoglm", "transformers"))
        ratio = row["ratio"]
        lines.append(
            f"| {name} | {ours:,.0f} | {theirs:,.0f} | "
            f"**{ratio['median']:.1f}×** ({ratio['min']:.1f} to {ratio['max']:.1f}) |"
        )
    return "\n".join(lines)


def between(values: list[float], form: str) -> str:
    """Smallest to largest of some numbers, as text."""
    low, high = (format(f(values), form) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def spread(values: list[float]) -> dict:
    """Median and extremes of repeated measurements."""
    return {
        k: round(float(f(values)), 3)
        for k, f in (("median", np.median), ("min", min), ("max", max))
    }


def save_result(name: str, result: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def load_result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def write_readme() -> None:
    """Put the measured tables between the README's markers."""
    readme = Path(__file__).parent / "README.md"
    head, _, rest = readme.read_text().partition("<!-- measured -->\n")
    _, _, tail = rest.partition("<!-- end -->\n")
    readme.write_text(f"{head}<!-- measured -->\n{readme_tables()}\n<!-- end -->\n{tail}")


def main(arguments: list[str]) -> None:
    commands = {
        "generator": bench_generator,
        "tasks": bench_tasks,
        "staleness": bench_staleness,
        "readme": write_readme,
    }
    command, *runs = arguments or [""]
    if command == "plot" and runs:
        for run in runs:
            draw_run(Path(run))
    elif command in commands and not runs:
        commands[command]()
    else:
        allowed = f"{', '.join(commands)} or plot RUN [RUN ...]"
        common.fail(ValueError(f"{' '.join(arguments)!r}: must be {allowed}"))


if __name__ == "__main__":
    main(sys.argv[1:])
