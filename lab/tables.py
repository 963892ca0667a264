"""tables.py: docs/measured.md, written from what is recorded in results/*.json.

Run: `python bench.py tables`; a test compares the page with `measured_page`. A section whose files
were not recorded is left out. Left out: measuring, and pictures (plots.py).
"""

from itertools import product

from lab.plots import RESULTS, between, load_result, markdown
from lab.races import JUDGED, READING, medians, race_table

PAGE = RESULTS.parent / "docs" / "measured.md"
ALONE, TOGETHER = "sparse, query block 1", "sparse, query block 16"
INTRO = """# What was measured

Written by `python bench.py tables` from the files in `results/`. Ratios compare runs of one
machine; a median stands beside its extremes, as in 2.03× (1.99 to 2.05). `python bench.py NAME
--record` measures a section again."""


def measured_page() -> str:
    """The page, section by section."""
    sections = {  # title: (lines, files)
        "Default flags": (task_lines, ["tasks"]),
        "Synchronous against asynchronous": (race_lines, ["async"]),
        "The same on one GPU": (gpu_lines, ["async-cuda"]),
        "Staleness": (staleness_lines, ["staleness"]),
        "Objectives on stale data": (objective_lines, ["objectives"]),
        "Faults and replay": (fault_lines, ["faults", "replay"]),
        "Sparse attention: training it": (recipe_lines, ["recipe"]),
        "Sparse attention: decoding": (decode_lines, ["decode-cpu"]),
        "Sparse attention: kernels": (kernel_lines, ["dsa-cuda", "decode-cuda"]),
        "The generator": (generator_lines, ["generator"]),
        "The simulator": (simulator_lines, ["simulate", "scale"]),
    }
    lines = [INTRO, "", "## In short", ""]
    for claim, measured, caveat, command in claims():
        lines.append(f"- **{claim}**: {measured}. {caveat}. `{command}`")
    for title, (section, files) in sections.items():
        if all((RESULTS / f"{name}.json").is_file() for name in files):
            lines += ["", f"## {title}", "", *section(*map(load_result, files))]
    return "\n".join([*lines, "", "## Machines", "", *machine_lines(), ""])


def write_tables() -> str:
    """Write the page; returns where it is."""
    PAGE.write_text(measured_page())
    return str(PAGE.relative_to(RESULTS.parent))


def claims() -> list[tuple[str, str, str, str]]:
    """The five that matter: (claim, measured here, caveat, command), from results/."""
    runs, bounds = load_result("async")["runs"], load_result("staleness")["runs"]
    faults, replays = load_result("faults"), load_result("replay")["runs"]
    gains = []
    for task, mode in JUDGED.items():
        best, found = medians(runs, task)
        row, seconds = found[mode], [found[name]["target_s"] for name in (mode, best)]
        gains.append(
            f"`{task}` {row['gain']:.2f}× ({between(row['gains'], '.2f')}; "
            f"{len(row['seeds'])} seeds, {seconds[0]:.1f} s against {seconds[1]:.1f} s)"
        )
    over = max(row["max"] - row["bound"] for row in bounds)
    lost = sum(row["groups"]["admitted"] - row["groups"]["trained"] for row in bounds)
    kernels = [row["forward+backward"] for row in load_result("dsa-cuda")["rows"]]
    at_8k, at_128k = (speed_up(kernels[i], ALONE, "CUDNN") for i in (1, -1))
    return [
        (
            "Asynchronous training is faster to the same score",
            f"over the best synchronous mode on the same two cores: {'; '.join(gains)}",
            "In brackets, where the ratio lies in 90% of resamplings; tiny models, short answers",
            "python bench.py race --modes full",
        ),
        (
            "Nothing is trained that is too old",
            f"oldest token over the bound in {len(bounds)} runs: {over:+d} versions; {lost} groups "
            "lost or dropped",
            "One task, at most 8 versions",
            "python bench.py staleness",
        ),
        (
            "Nothing is lost, and a run can be executed again",
            f"{faults['faults']} faults on purpose: {faults['lost']} groups lost, "
            f"{faults['duplicated']} trained twice; {sum(row['same'] for row in replays)} of "
            f"{len(replays)} runs replayed to the same weights",
            "Faults of processes on one machine; replay needs the same kind of CPU",
            "python bench.py faults",
        ),
        (
            "Sparse attention pays at long context",
            f"forward and backward on an H100, selection included, against cuDNN: {at_8k:.1f}× at "
            f"8k, {at_128k:.1f}× at 128k tokens",
            "At 8k and below it is slower",
            "python bench.py dsa",
        ),
        (
            "An indexer must be trained, in stages",
            "random < warm-up only < full recipe "
            + load_result("recipe")["shown"]["random < warm-up only < full"],
            "One synthetic task, two layers",
            "python bench.py recipe --seeds 3",
        ),
    ]


def times(ratio: dict) -> str:
    """A ratio's median, and between which values it lay."""
    return f"{ratio['median']:.2f}× ({ratio['min']:.2f} to {ratio['max']:.2f})"


def task_lines(result: dict) -> list[str]:
    rows = []
    for task, runs in result["tasks"].items():
        solved = [[run[when]["solved"] for run in runs] for when in ("before", "after")]
        turns = [run["after"]["turns"] for run in runs]
        name = f"`--task {task}`, {len(runs)} seeds, {runs[0]['steps']} steps"
        cells = [between(solved[0], ".0%"), between(solved[1], ".1%"), between(turns, ".2f")]
        rows.append([name, *cells, between([run["command_s"] for run in runs], ".0f")])
    head = ["`train_async.py`", "solved before", "solved after", "turns", "seconds"]
    text = "Solved: the number was found within 6 guesses, or an answer has no mistake (greedy)."
    return [text, "", *markdown(head, rows)]


def race_lines(result: dict) -> list[str]:
    text = "In every mode, the process that generates verifies (`--reward-workers 0`)."
    return [f"{READING} {text}", *race_table(result["runs"])]


def gpu_lines(result: dict) -> list[str]:
    text = "Both roles share the GPU; model `medium`. Few seeds: time to the score is hardly told "
    return [f"{text}from chance, episodes a second are.", *race_table(result["runs"])]


def staleness_lines(result: dict) -> list[str]:
    rows = []
    for bound in sorted({run["bound"] for run in result["runs"]}):
        runs = [run for run in result["runs"] if run["bound"] == bound]
        admitted, trained = (sum(r["groups"][k] for r in runs) for k in ("admitted", "trained"))
        rows.append([f"{bound}", f"{max(run['max'] for run in runs)}", f"{admitted - trained}"])
    head = ["bound (versions)", "oldest token ever trained", "groups lost or dropped"]
    return ["`sum`, over all three swap modes.", "", *markdown(head, rows)]


def objective_lines(result: dict) -> list[str]:
    runs = [run for run in result["runs"] if run["kl_threshold"] == 1.0]
    cases = list(dict.fromkeys((run["max_staleness"], run["rollout_weights"]) for run in runs))
    cells, damped = {}, []
    for run in runs:
        text = f"{run['reward']:.2f} ({run['ess']:.2f})"
        cells.setdefault(run["objective"], [f"`{run['objective']}`"]).append(text)
    for run in result["runs"]:
        if run["objective"] == "cispo" and run["rollout_weights"] == "float32":
            threshold = f"above {run['kl_threshold']:g}"
            damped.append([f"{run['max_staleness']}", threshold, f"{run['reward']:.2f}"])
    shares = [run["reference_share"] for run in result["runs"]]
    text = f"`reverse`, half batches, {result['steps']} steps: held-out reward (effective sample "
    head = ["objective"]
    for eta, weights in cases:
        head.append(f"η = {eta}" + ", 8-bit rollouts" * (weights != "float32"))
    damper = (
        "`cispo`, by the mean KL above which the damper acts. The reference pass that it reads "
    )
    damper += f"takes {between(shares, '.0%')} of a learner's step."
    table = markdown(["η", "damper acts", "reward"], damped)
    return [f"{text}size).", "", *markdown(head, list(cells.values())), "", damper, "", *table]


def fault_lines(result: dict, replay: dict) -> list[str]:
    same = sum(run["same"] for run in replay["runs"])
    row = ["runs of 50 steps replayed to the same weights", f"{same} of {len(replay['runs'])}"]
    return markdown(["", "faults on purpose"], [*fault_rows(result), row])


def fault_rows(result: dict) -> list[list[str]]:
    """What a campaign of faults has shown so far."""
    dead, stopped = (result["noticed_after_s"][kind] for kind in ("dead", "stopped"))
    kills, ends = result["checkpoint_kills"], result["ends"]
    hangs = sum("hangs" in failure["said"] for failure in result["failures"])
    by_name = sum(ends.values()) - ends["finished"] - ends["killed"]
    cells = {
        f"faults injected, in {len(result['runs'])} runs of all roles": result["faults"],
        "runs that hung, or ended without naming an error": f"{hangs}, {len(result['failures'])}",
        "groups lost, trained twice": f"{result['lost']}, {result['duplicated']}",
        "runs killed, or stopped with an error by name": f"{ends['killed']}, {by_name}",
        "groups made again": result["requeued"],
        "until a dead worker is named (s)": f"{dead['median']:.2f}, at most {dead['max']:.2f}",
        "until a silent one is": f"{stopped['median']:.1f}, at most {stopped['max']:.1f}",
        "longest time without a step (s)": f"{result['no_progress_s']:.1f}",
        "kills in the middle of a checkpoint": kills["kills"],
        "weights at the end as without kills": "yes" if kills["bitwise_equal"] else "NO",
    }
    return [[name, str(value)] for name, value in cells.items()]


def recipe_lines(result: dict) -> list[str]:
    config, shown = result["settings"], result["shown"]["random < warm-up only < full"]
    keys = config["chunk_size"] * config["top_k"]
    text = f"Every variant but the first attends to {keys} keys; {config['seeds']} seeds. From 4× "
    return [f"{text}on, random < warm-up only < full {shown}.", "", result["table"]]


def decode_lines(result: dict) -> list[str]:
    rows = []
    for name in result["rows"][0]["tokens_per_s"]:
        cells = [name]
        for row in result["rows"]:
            rate, ratio = row["tokens_per_s"][name]["median"], row["over_dense"][name]["median"]
            cells.append(f"{rate:,.0f} ({ratio:.1f}×)")
        rows.append(cells)
    head = ["tokens/s (over dense) at", *(f"{row['length']:,}" for row in result["rows"])]
    text = f"Model `{result['model']}`, one CPU thread, {result['slots']} slots, full caches."
    return [text, "", *markdown(head, rows)]


def speed_up(costs: dict, way: str, backend: str) -> float:
    """How many times as fast a sparse way is as dense attention by one of PyTorch's backends."""
    return costs[f"dense {backend}_ATTENTION"]["ms"]["median"] / costs[way]["ms"]["median"]


def kernel_lines(result: dict, decoding: dict) -> list[str]:
    rows, (query_heads, key_heads, width) = [], result["heads"]
    for kind, way in product(("forward", "forward+backward"), (ALONE, TOGETHER)):
        cells = [f"{kind}, {way.removeprefix('sparse, ')}"]
        for row in result["rows"]:
            gains = [speed_up(row[kind], way, backend) for backend in ("CUDNN", "FLASH")]
            milliseconds = row[kind][way]["ms"]["median"]
            cells.append(f"{milliseconds:.1f} ({gains[0]:.1f}×, {gains[1]:.1f}×)")
        rows.append(cells)
    cells = [f"decode, model `{decoding['model']}`, {decoding['slots']} slots"]
    for row in decoding["rows"]:
        rate, ratio = (row[key]["16 chunks of 64"] for key in ("tokens_per_s", "over_dense"))
        milliseconds = 1e3 * decoding["slots"] / rate["median"]
        cells.append(f"{milliseconds:.1f} ({ratio['median']:.1f}×)")
    lengths = [row["length"] for row in result["rows"]]
    own = dict(zip(lengths, (row["forward+backward"] for row in result["rows"]), strict=True))
    ours = [f"{speed_up(own[n], ALONE, 'FLASH'):.2f}×" for n in (8192, 131072)]
    return [
        f"16 chunks of 64, selection included; {query_heads} query heads, {key_heads} key heads of "
        f"{width}, {result['dtype']}. In brackets: how many times as fast as dense attention by "
        "cuDNN (the fastest here), and by PyTorch's flash backend; for decoding, by this project. "
        "The queries of a block select together.",
        "",
        *markdown(["milliseconds at", *(f"{n:,}" for n in lengths)], [*rows, cells]),
        "",
        "The table published with NSA kernels in Triton (H100, 64 query heads, 4 key heads, "
        "selection excluded, against FlashAttention-2, forward+backward) begins with 1.6× at 8k "
        f"and ends with 20.7× at 128k. Nearest to these terms here (query block 1, flash backend, "
        f"but selection included): {ours[0]} and {ours[1]}.",
    ]


def generator_lines(result: dict) -> list[str]:
    rows = []
    for name, row in result["workloads"].items():
        rates = [f"{rate['median']:,.0f}" for rate in row["tokens_per_s"].values()]
        rows.append([name, *rates, times(row["ratio"])])
    head = ["tokens/s", "here", f"transformers {result['transformers']}", "ratio"]
    millions = result["parameters"] / 1e6
    text = f"One CPU thread, {millions:.2f}M parameters, {result['slots']} slots. transformers "
    text += "generates batches, each until its longest answer is done."
    return [text, "", *markdown(head, rows)]


def simulator_lines(result: dict, scale: dict) -> list[str]:
    within = sum(run["within"] for run in result["runs"])
    text = f"Of {len(result['runs'])} setups that it was not calibrated on, {within} have tokens a "
    text += "second and mean staleness within 10% of what it says, and idle shares within 10 "
    text += "points. What it says of published systems, by arithmetic (`scale.json`):"
    rows = []
    for row in scale["published"]:
        rows.append([row["what"], row["published"], f"{row['speed_up']}×", row["utilisation"]])
    head = ["system", "published", "predicted", "predicted utilisation"]
    return [text, "", *markdown(head, rows)]


def machine_lines() -> list[str]:
    """Which figures come from which machine."""
    found: dict[str, list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        machine = load_result(path.stem).get("machine")
        if machine:
            gpus = "".join(f"one {name} and " for name in machine["gpus"])
            where = f"{gpus}{machine['cores']} cores of {machine['cpu']}, "
            where += f"Python {machine['python']}, torch {machine['torch']}"
            found.setdefault(where, []).append(path.stem)
    return [f"- {', '.join(names)}: {where}" for where, names in found.items()]
