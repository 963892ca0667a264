"""tables.py: what the README says was measured, written from results/*.json.

Run: `python bench.py readme`; a test compares the README with `readme_tables`. Left out: measuring
(bench.py, compare.py, speed.py) and pictures (report.py).
"""

from itertools import product

from lab.plots import RESULTS, between, load_result
from lab.races import GPU_MODES, JUDGED, SPLIT, async_table, medians, rate_gain

ALONE, TOGETHER = "sparse, query block 1", "sparse, query block 16"


README = RESULTS.parent / "README.md"


def readme_tables() -> str:
    """The measured part of the README, from results/*.json; a test compares the two."""
    tasks, speed, bounds = (load_result(name) for name in ("tasks", "generator", "staleness"))
    lines = [
        f"Machines, by file in `results/`: {machines()}. `solved`: the number was found within 6 "
        "guesses; in the other tasks, a held-out problem was answered without a single mistake. "
        "Answers are greedy.",
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
        lines.append(f"| {name} | {ours:,.0f} | {theirs:,.0f} | {times(row['ratio'])} |")
    roles = load_result("roles")
    head = f"| `python bench.py roles {roles['before']}`: speed over that of this older commit |"
    lines += ["", f"{head} generator | learner | whole run |", "|---|---|---|---|"]
    for task, rows in roles["tasks"].items():
        lines.append(f"| `{task}` | {' | '.join(times(row['ratio']) for row in rows.values())} |")
    compiled = load_result("compile")["tasks"]
    ratios = "; ".join(f"`{task}` {times(row['ratio'])}" for task, row in compiled.items())
    seconds = between([row["compile_s"] for row in compiled.values()], ".0f")
    text = "`--compile decode`, over the tokens a second of one CPU thread without it"
    lines += ["", f"{text} (`python bench.py compile`; {seconds} s to start): {ratios}."]
    sections = [claims(), lines, fault_table(), sparse_tables(), races(), objective_table()]
    return "\n".join(line for section in sections for line in section)


def times(ratio: dict) -> str:
    """A ratio's median, and between which values it lay."""
    return f"**{ratio['median']:.2f}×** ({ratio['min']:.2f} to {ratio['max']:.2f})"


def objective_table() -> list[str]:
    """The measured part of the README on objectives under staleness, and on the damper."""
    result = load_result("objectives")
    runs = [r for r in result["runs"] if r["kl_threshold"] == 1.0]
    cases = list(dict.fromkeys((r["max_staleness"], r["rollout_weights"]) for r in runs))
    heads = [f"η = {eta}" + ", 8-bit rollouts" * (kind != "float32") for eta, kind in cases]
    lines = [
        "",
        f"| `reverse`, half batches, {result['steps']} steps: held-out reward (effective sample "
        f"size) | {' | '.join(heads)} |",
        "|---" * (len(cases) + 1) + "|",
    ]
    for name in dict.fromkeys(r["objective"] for r in runs):
        own = {
            (r["max_staleness"], r["rollout_weights"]): r for r in runs if r["objective"] == name
        }
        cells = [f"{own[case]['reward']:.2f} ({own[case]['ess']:.2f})" for case in cases]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    named = {0.0: "always", 0.15: "above 0.15", 1.0: "above 1.0", 1e9: "never"}
    arms = {
        eta: ", ".join(
            f"{text} {r['reward']:.2f}"
            for at, text in named.items()
            for r in result["runs"]
            if (r["objective"], r["max_staleness"], r["rollout_weights"], r["kl_threshold"])
            == ("cispo", eta, "float32", at)
        )
        for eta in (4, 16)
    }
    shares = [r["reference_share"] for r in result["runs"]]
    text = "; ".join(f"η = {eta}: {values}" for eta, values in arms.items())
    return [
        *lines,
        "",
        f"When the KL damper acts, and the reward of `cispo` then: {text}. The reference pass that "
        f"it reads takes {between(shares, '.0%')} of a learner's step.",
    ]


def machines() -> str:
    """Which figures come from which machine."""
    found: dict[str | None, list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        m = load_result(path.stem).get("machine")
        gpu = m and "".join(f"one {name} and " for name in m["gpus"])
        where = m and (
            f"{gpu}{m['cores']} cores of {m['cpu']}, Python {m['python']}, torch {m['torch']}"
        )
        found.setdefault(where, []).append(path.stem)
    return "; ".join(f"{', '.join(names)} on {where}" for where, names in found.items() if where)


def races() -> list[str]:
    """The measured part of the README on asynchronous against synchronous training."""
    texts = {
        "async": "`python bench.py async full`: medians over the seeds, from lowest to highest; × "
        "best sync is the ratio of two median times, and where it lies in 90% of 2,000 resamplings."
        " A run that ended below the score has taken infinitely long. In every mode, the process "
        "that generates verifies (`--reward-workers 0`).",
        "async-avx2": "An earlier version, on two cores with AVX2 instead of AVX-512:",
        "async-cuda": "`python bench.py async gpu`, on one GPU that both roles share, model "
        "`medium`. Few seeds: time to the score is hardly told from chance, episodes a second are.",
    }
    lines = []
    for name, text in texts.items():
        if (RESULTS / f"{name}.json").is_file():
            lines += ["", text, *async_table(load_result(name)["runs"])]
    return lines


def claims() -> list[str]:
    """The table "claim, published, measured here, how"; every number is read from results/."""
    if not all((RESULTS / f"{name}.json").is_file() for name in ("async", "scale")):
        return []
    runs, scale = load_result("async")["runs"], load_result("scale")["published"]
    both = {task: medians(runs, task) for task in ("guess", "sum")}
    faster, rates, busy = [], [], []
    for task, (best, found) in both.items():
        base, whole = found[best], SPLIT["swaps in flight"]
        for mode in JUDGED[task]:
            row = found[mode]
            seconds = [f"{x['target_s']:.1f} s" for x in (row, base)]
            faster.append(
                f"`{task}` {row['gain']:.2f}× at {mode.removeprefix('async, ')} (90% interval "
                f"{between(row['gains'], '.2f')}; medians of {len(row['seeds'])} seeds, "
                f"{seconds[0]} against {seconds[1]})"
            )
        rates.append(f"`{task}` {rate_gain(found, whole, best):.2f}×")
        shares = [f"{min(r['busy_rollout'], r['busy_learner']):.0%}" for r in (base, found[whole])]
        busy.append(f"`{task}` {' → '.join(shares)}")
    avx2 = medians(load_result("async-avx2")["runs"], "guess")[1][JUDGED["guess"][0]]
    gpu = {t: medians(load_result("async-cuda")["runs"], t)[1] for t in both}
    on_gpu = [f"`{t}` {rate_gain(found, *reversed(GPU_MODES)):.2f}×" for t, found in gpu.items()]
    swaps = [
        rate_gain(found, SPLIT["swaps in flight"], SPLIT["no straggler tail"])
        for _, found in both.values()
    ]
    predicted = "; ".join(
        f"{r['what']}: {r['published']}, here {r['speed_up']}x ({r['utilisation']})" for r in scale
    )
    decode, recipe = load_result("decode-cpu")["rows"][-1], load_result("recipe")["shown"]
    ratios = [row["median"] for name, row in decode["over_dense"].items() if name != "dense"]
    kernels = load_result("dsa-cuda")
    alone, together = (
        [kernel_gain(row["forward"], way)[1] for row in kernels["rows"]]
        for way in (ALONE, TOGETHER)
    )
    bounds = load_result("staleness")["runs"]
    worst = max(r["max"] - r["bound"] for r in bounds)
    held_out = load_result("simulate")["runs"]
    rows = [
        (
            "asynchronous training is faster to the same score",
            "AReaL 2.77× and 2.27× (2505.24298), "
            "PipelineRL about 2× (2509.19128), ROLL Flash 2.24× (2510.11345), on 128 GPUs and more",
            f"two CPU cores, over the best synchronous mode: {'; '.join(faster)}; `guess` "
            f"with AVX2, before: {avx2['gain']:.2f}× ({between(avx2['gains'], '.2f')}); episodes a "
            f"second at η = 4: {', '.join(rates)}; on one H100, model `medium`, η = 2: "
            f"{', '.join(on_gpu)}",
            "`python bench.py async full`, `async gpu`",
        ),
        (
            "it keeps machines busy",
            "52% → 87% (a secondary source)",
            f"share of time that the less busy role works, best synchronous mode → η = 4: "
            f"{', '.join(busy)}",
            "the same",
        ),
        (
            "swapping weights in flight helps",
            "12 to 17% more throughput (AReaL)",
            f"episodes a second over draining: {', '.join(f'{s:.2f}×' for s in swaps)}",
            "the same",
        ),
        (
            "staleness is bounded",
            "accepted + running ≤ (η + version + 1)·batch (AReaL)",
            f"oldest token over the bound in {len(bounds)} runs: {worst:+d} versions",
            "`python bench.py staleness`",
        ),
        (
            "a model predicts it",
            predicted,
            f"of {len(held_out)} setups that it was not calibrated on, "
            f"{sum(r['within'] for r in held_out)} have tokens a second and mean staleness within "
            "10% of what it says, and the idle share within 10 points",
            "`python bench.py simulate`, `python simulate.py scale`",
        ),
        (
            "sparse attention pays at long context",
            "1.6× at 8k to 20.7× at 128k (NSA kernels, H100)",
            f"forward on one H100: {alone[1]:.1f}× at 8k to {alone[-1]:.1f}× at 128k (blocks of 16 "
            f"queries that select together: {together[1]:.1f}× to {together[-1]:.1f}×); "
            f"decoding at {decode['length']:,} tokens on one CPU thread: "
            f"{min(ratios):.1f}× to {max(ratios):.1f}×",
            "`python bench.py dsa`, `decode`",
        ),
        (
            "an indexer must be trained, in stages",
            "dense, indexer warm-up, sparse (DeepSeek-V3.2)",
            f"random < warm-up only < full {recipe['random < warm-up only < full']}",
            "`python recipe.py --seeds 3`",
        ),
    ]
    head = ["| claim | published | measured here | how |", "|---|---|---|---|"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows), ""]


def fault_table() -> list[str]:
    """The measured part of the README on faults and replay."""
    result, runs = load_result("faults"), load_result("replay")["runs"]
    dead, stopped = (result["noticed_after_s"][kind] for kind in ("dead", "stopped"))
    kills, same = result["checkpoint_kills"], sum(run["same"] for run in runs)
    hangs = sum("hangs" in failure["said"] for failure in result["failures"])
    named = f"{stopped['median']:.1f}, at most {stopped['max']:.1f}"
    ends, equal = result["ends"], "yes" if kills["bitwise_equal"] else "NO"
    cells = {
        f"faults injected, in {len(result['runs'])} runs of all roles": result["faults"],
        "runs that hung, or ended without naming an error": f"{hangs}, {len(result['failures'])}",
        "groups lost, trained twice": f"{result['lost']}, {result['duplicated']}",
        "runs killed or stopped with an error by name, and resumed": (
            f"{ends.get('killed', 0)}, {sum(ends.values()) - ends['finished'] - ends['killed']}"
        ),
        "groups made again": result["requeued"],
        "until a dead worker is named (s)": f"{dead['median']:.2f}, at most {dead['max']:.2f}",
        "until a stopped worker is named (s)": named,
        "longest time without a step (s)": f"{result['no_progress_s']:.1f}",
        "kills in the middle of a checkpoint": kills["kills"],
        "… resumed each time, weights at the end as without": equal,
        "runs of 50 steps replayed to the same weights": f"{same} of {len(runs)}",
    }
    rows = [f"| {name} | {value} |" for name, value in cells.items()]
    return ["", "| `python bench.py faults` and `replay` | |", "|---|---|", *rows]


def sparse_tables() -> list[str]:
    """The measured part of the README on sparse attention: the recipe, and decoding."""
    recipe, speed = load_result("recipe"), load_result("decode-cpu")
    rows, settings = speed["rows"], recipe["settings"]
    attended, minutes = settings["chunk_size"] * settings["top_k"], recipe["wall_s"] / 60
    heads = "".join(f" {r['length']:,} |" for r in rows)
    lines = [
        f"\n`python recipe.py --seeds {settings['seeds']}` ({minutes:.0f} minutes): every variant "
        f"but the first attends to {attended} keys. From 4× on, random < warm-up only < full "
        f"{recipe['shown']['random < warm-up only < full']}.\n\n{recipe['table']}\n",
        f"| decode, tokens/s on one CPU thread, {speed['slots']} slots, context of |" + heads,
        "|---" * (len(rows) + 1) + "|",
    ]
    for name in rows[0]["tokens_per_s"]:
        cells = []
        for row in rows:
            ratio = "" if name == "dense" else f" ({row['over_dense'][name]['median']:.1f}×)"
            cells.append(f"{row['tokens_per_s'][name]['median']:,.0f}{ratio}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    peaks = ", ".join(f"{r['prefill_peak_mib']:.0f} MiB at {r['length']:,}" for r in rows)
    text = f"Peak memory of a sparse prefill of one sequence: {peaks}."
    return [*lines, "", text, *kernel_table()]


def kernel_gain(costs: dict, sparse: str) -> tuple[float, float]:
    """(milliseconds of one of the sparse ways, how many times as fast it is as the quickest dense
    one), from a row of results/dsa-*.json."""
    ms = {name: cost["ms"]["median"] for name, cost in costs.items()}
    dense = min(value for name, value in ms.items() if name.startswith("dense"))
    return ms[sparse], dense / ms[sparse]


def kernel_table() -> list[str]:
    """The measured part of the README on the kernels: sparse attention on a GPU."""
    shape, decoding = load_result("dsa-cuda"), load_result("decode-cuda")
    rows, (query_heads, key_heads, width) = shape["rows"], shape["heads"]
    lines = [
        "",
        f"| {shape['machine']['gpus'][0]}: ms, and how many times as fast as dense; context of |"
        + "".join(f" {r['length']:,} |" for r in rows),
        "|---" * (len(rows) + 1) + "|",
    ]
    for way, kind in product((ALONE, TOGETHER), ("forward", "forward+backward")):
        cells = ["{:.1f} ({:.1f}×)".format(*kernel_gain(row[kind], way)) for row in rows]
        lines.append(f"| {kind}, {way.removeprefix('sparse, ')} | {' | '.join(cells)} |")
    cells = []
    for row in decoding["rows"]:
        rate, ratio = (row[key]["16 chunks of 64"] for key in ("tokens_per_s", "over_dense"))
        ms = 1e3 * decoding["slots"] / rate["median"]
        cells.append(f"{ms:.1f} ({ratio['median']:.1f}×)")
    name = f"decode, model `{decoding['model']}`, {decoding['slots']} slots"
    lines.append(f"| {name} | {' | '.join(cells)} |")
    text = f"16 chunks of 64. Forward and backward: {query_heads} query heads, {key_heads} key "
    text += f"heads of {width}, {shape['dtype']}; dense is the quickest of PyTorch's backends, "
    text += "sparse includes the selection; a query block selects together. "
    return [*lines, "", text + "`python bench.py dsa` and `decode`."]


def write_readme() -> None:
    """Put the measured tables between the README's markers."""
    head, _, rest = README.read_text().partition("<!-- measured -->\n")
    _, _, tail = rest.partition("<!-- end -->\n")
    README.write_text(f"{head}<!-- measured -->\n{readme_tables()}\n<!-- end -->\n{tail}")
