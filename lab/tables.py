"""tables.py: docs/measured.md, written from what is recorded in results/*.json.

Run: `python bench.py tables`; a test compares the page with `measured_page`.
Left out: measuring, and pictures (plots.py).
"""

import math
from collections import defaultdict
from itertools import product
from pathlib import Path

from lab.agents import AGENTS, agent_lines, solved
from lab.campaigns import fault_facts
from lab.distil import distil_lines, judge_lines
from lab.gpu import kernel_lines as error_lines
from lab.gpu import part_lines
from lab.plots import RESULTS, between, load_result, markdown
from lab.qwen import qwen_lines
from lab.races import JUDGED, modes_of, race_lines
from lab.recipe import recipe_lines
from lab.stale import attempt_claim, attempt_lines, method_claim, method_lines
from runtime.pictures import column, grouped

PAGE = RESULTS.parent / "docs" / "measured.md"
ALONE, LESS = "sparse, query block 1", "sparse, query block 8"
INTRO = """# What was measured

By `python bench.py tables` from the files in `results/`. Ratios compare runs of one machine.
Brackets hold the lowest and the highest, unless a table says otherwise. `bench.py NAME --record`
measures again.

## In short
"""
STAGED = "random < warm-up only < full"
SIMULATED = """\
What it says of published systems, by arithmetic: speed-up over synchronous training, or utilisation
of the devices, synchronous -> asynchronous.
"""
OLD_DECODE = """\
Float32; dense is SDPA with a mask, which takes 89 times as long at 131,072 as to read keys and
values would: no fair baseline. Kernels of 23 November; today's were not timed.
"""
NOT_TIMED = "; kernels of 23 November, today's were not timed"
NSA = """
The table published with NSA kernels in Triton (H100, 64 query heads, 4 key heads, selection
excluded, forward+backward against FlashAttention-2) goes from 1.6× at 8k to 20.7× at 128k. On the
nearest terms here (query block 1, against the flash backend, but selection included):"""

LONG = """\
What the cache holds of one sequence of {:,} tokens, by arithmetic; in brackets, as a share of dense
in bfloat16. The tensors that were allocated for it, and the growth of the process when all of it
was written, differ from that by at most {:.2%} (`medium`, and one layer of Qwen3-0.6B; an index
key has 16 numbers in the former, 128 in the latter).
"""
FORTY = """
Sparse attention saves none of it: any key may be selected later, so all are kept, and what is
scored comes on top. Articles say, without a source, that DSA takes "40% less memory at 128K": that
is 8 bits. In DeepSeek-V3.2's layout (512 latent numbers, 64 rotary ones and an index key of 128)
DSA in 8 bits takes {:.1%} less than DSA in bfloat16; without index keys it would be {:.1%}. Against
dense attention in bfloat16 it is {:.1%}, and DSA with its latents in bfloat16 takes {:.1%} more.
"""

ONCE = """\
On two cores of an Intel Xeon, by code that is gone (it stands in commit 657c994):

- A step of two learners, a CPU thread each, was 1.82 times as fast as one's with model `small`, and
  1.78 times with `medium`; 21% and 26% of it went into meetings.
- Neighbouring queries select much the same. In a model of four layers that has learned text, the
  lists of 8 neighbours (16 chunks of 64, by mean keys) held 1.78 times as many different chunks as
  one list; by an indexer 1.58 times, and 2,048 single tokens 1.60 times. From random weights it
  was 2.6 to 3.5 times.
- The simulator, with costs that were found in the logs of some runs, predicted 8 of 9 other setups:
  tokens a second within 10%, mean staleness within 10% or 0.1 versions, idle shares within 10
  points.
"""


def measured_page() -> str:
    """The page, section by section."""
    lines = [INTRO, claims()]
    for title, (section, *files) in SECTIONS.items():
        if all((RESULTS / f"{file}.json").exists() for file in files):
            lines += ["", f"## {title}", "", *section(*map(load_result, files))]
    return "\n".join([*lines, ""])


def tables_of(folder: Path) -> list[str]:
    """What the page says of the files in the folder of a measurement."""
    lines = []
    for title, (section, *files) in SECTIONS.items():
        places = [folder if (folder / f"{file}.json").exists() else RESULTS for file in files]
        if folder in places:
            lines += ["", f"## {title}", "", *section(*map(load_result, files, places))]
    return lines


def write_tables() -> str:
    """Write the page; returns where it is."""
    PAGE.write_text(measured_page())
    return str(PAGE.relative_to(RESULTS.parent))


def claims() -> str:
    """Those that matter, as a table; README.md has the same."""
    runs = grouped(load_result("race")["runs"], "task")
    gains = []
    for task, mode in JUDGED.items():
        best, found = modes_of(runs[task])
        row = found[mode]
        gains.append(f"`{task}` {row['faster']:.2f}× ({between(row['each'], '.2f')})")
    bounded = load_result("staleness")["runs"]
    ages = column(bounded, "staleness")
    over = max(age["max"] - age["bound"] for age in ages)
    books = column(bounded, "ledger")
    missing = sum(book["admitted"] - book["trained"] for book in books)
    arms = grouped(load_result("agents")["runs"], "arm")
    learned = [f"`{task}` {between(solved(arms[task]), '.0%')}" for task in AGENTS]
    slowest = max(column(sum((arms[task] for task in AGENTS), []), "command_s"))
    faults = load_result("faults")
    same = column(load_result("replay")["runs"], "same")
    timed = load_result("dsa-cuda")["rows"]
    kernels = column(timed, "forward+backward")
    old = "" if "sparse, indexer 4 x 64" in timed[0]["forward"] else NOT_TIMED
    at_8k, at_128k = (f"{speed_up(kernels[i], ALONE, 'CUDNN'):.1f}×" for i in (1, -1))
    staged = load_result("recipe")["shown"][STAGED]
    return f"""\
| Claim | Measured here | Caveat | How |
|---|---|---|---|
| Asynchronous training can be faster | episodes a second over the best synchronous run on the \
same two cores: {"; ".join(gains)} | it depends on the work; tiny models | \
`python bench.py race` |
| Nothing is trained that is too old | in {len(ages)} runs the oldest token was {over} versions \
beyond the bound; {missing} groups lost or dropped | one task, tiny models | \
`python bench.py staleness` |
| Nothing is lost, and runs can be replayed | {faults["faults"]} faults on purpose: \
{faults["lost"]} groups lost, {faults["duplicated"]} trained twice; {sum(same)} of {len(same)} \
runs without faults replayed to the same weights | faults of processes on one machine; replay \
needs the same kind of CPU | `python bench.py faults`, `replay` |
| Some remedies for stale data help | data 4 and 16 versions old, against none: \
{method_claim(load_result("methods"))}; {attempt_claim(load_result("attempts"))} | two tiny \
tasks (`ess`: one), published constants | `python bench.py staleness-methods` |
| Agents learn to use tools and to mend their programs | held out, 5 seeds each, from random \
weights, in at most {slowest:.0f} s: {", ".join(learned)} | tiny tasks | `python bench.py agents` |
| Sparse attention pays at long context | forward and backward on an H100, selection included, \
against cuDNN: {at_8k} at 8k, {at_128k} at 128k tokens | short contexts are slower{old} | \
`python bench.py dsa` |
| An indexer must be trained, in stages | {STAGED} {staged} | one task, tiny models | \
`python bench.py recipe --seeds 3` |"""


def task_lines(result: dict) -> list[str]:
    rows = []
    for task, runs in grouped(result["runs"], "task").items():
        cells = [
            f"`--task {task}`, {len(runs)} seeds, {runs[0]['steps']} steps",
            between(solved(runs, "before"), ".0%"),
            between(solved(runs), ".1%"),
            between(column(runs, "command_s"), ".0f"),
        ]
        rows.append(cells)
    head = ["`train_async.py`", "solved before", "solved after", "seconds"]
    text = "Solved: the number was found within 6 guesses, or an answer has no mistake (greedy).\n"
    return [text, *markdown(head, rows)]


def staleness_lines(result: dict) -> list[str]:
    ages = grouped(column(result["runs"], "staleness"), "bound")
    rows = [[bound, max(column(own, "max"))] for bound, own in ages.items()]
    text = f"`sum`, over all three swap modes, {len(result['runs'])} runs, in versions.\n"
    return [text, *markdown(["bound", "oldest token ever trained"], rows)]


def nested_table(corner: str, cells: dict[str, dict[str, str]]) -> list[str]:
    """A table of {row: {column: text}}."""
    rows = [[name, *row.values()] for name, row in cells.items()]
    return markdown([corner, *next(iter(cells.values()))], rows)


def fault_lines(result: dict, replay: dict) -> list[str]:
    same = column(replay["runs"], "same")
    replayed = {"runs of 50 steps replayed to the same weights": f"{sum(same)} of {len(same)}"}
    return markdown(["faults on purpose", ""], (fault_facts(result) | replayed).items())


def folder_lines(result: dict) -> list[str]:
    rows = []
    for name, run in result["runs"].items():
        seconds = run["seconds_to_95"] or math.inf
        cells = [name, f"{run['solved']:.0%}", f"{seconds:.0f}", run["same_answers"]]
        rows.append([*cells, *(f"{run[f'{what}_bytes']:,}" for what in ("published", "optimizer"))])
    head = ["`reverse:4`, 1M parameters", "solved", "seconds to 95%", "same by transformers"]
    return markdown([*head, "bytes published", "of the optimizer"], rows)


def decode_lines(result: dict) -> list[str]:
    cells = defaultdict(dict)
    for row in result["rows"]:
        length = f"{row['length']:,}"
        for name, rate in row["tokens_per_s"].items():
            ratio = row["over_dense"][name]["median"]
            text = f"{rate['median']:,.0f} ({ratio:.1f}×)"
            cells[name][length] = text
        for name, share in row.get("of_bound", {}).items():
            cells[f"{name}: of what memory allows"][length] = f"{share['median']:.0%}"
    text = f"Model `{result['model']}`, {result['slots']} slots with full caches.\n"
    if result["machine"]["gpus"] and "bytes_per_s" not in result:
        text += OLD_DECODE
    return [text, *nested_table("tokens/s (over dense) at", cells)]


def speed_up(costs: dict, way: str, backend: str = "") -> float:
    """How many times as fast a sparse way is as dense attention by one of PyTorch's backends, or by
    the fastest; a graph is compared with a graph."""
    graph = way.endswith("graph")
    same = [name for name in costs if name.endswith("graph") == graph]
    dense = [costs[name]["ms"]["median"] for name in same if name.startswith(f"dense {backend}")]
    return min(dense) / costs[way]["ms"]["median"]


def kernel_lines(result: dict) -> list[str]:
    cells, own_terms = defaultdict(dict), []
    for row in result["rows"]:
        length = f"{row['length']:,}"
        shown = [way for way in row["forward"] if not way.startswith(("dense", LESS))]
        for kind, way in product(("forward", "forward+backward"), shown):
            milliseconds = row[kind][way]["ms"]["median"]
            text = f"{milliseconds:.1f} ({speed_up(row[kind], way):.1f}×)"
            cells[f"{kind}, {way.removeprefix('sparse, ')}"][length] = text
        if "dense FLASH_ATTENTION" in row["forward"]:
            ratio = speed_up(row["forward+backward"], ALONE, "FLASH")
            own_terms.append(f"{ratio:.2f}× at {length}")
    query_heads, key_heads, width = result["heads"]
    text = f"""\
Selection included; {query_heads} query heads, {key_heads} key heads of {width}, {result["dtype"]}.
Lists have 16 chunks of 64 where nothing else is said. In brackets: times as fast as dense attention
by the fastest of PyTorch's backends.
"""
    others = [NSA, f"{', '.join(own_terms)}."] if own_terms else []  # a rehearsal has none
    return [text, *nested_table("milliseconds at", cells), *others]


def memory_lines(result: dict) -> list[str]:
    """Bytes of one long sequence; see lab/memory.py."""
    rows, cells = result["rows"], defaultdict(dict)
    plain = [row for row in rows if (row["kind"], row["precision"]) == ("dense", "bfloat16")]
    dense = {row["shape"]: row["bytes"] for row in plain}
    for row in rows:
        share = row["bytes"] / dense[row["shape"]]
        text = f"{row['bytes'] / 1e6:,.0f} ({share:.3f})"
        cells[f"{row['shape']}, {row['kind']}"][row["precision"]] = text
    for shape, own in result["weights"].items():
        cells[f"{shape}, all weights"] = {name: f"{n / 1e6:,.0f}" for name, n in own.items()}
    pairs = [(row[kind], row["computed"]) for row in rows for kind in ("tensors", "resident")]
    worst = max(abs(found / computed - 1) for found, computed in pairs)
    wide, sparse, narrow, both = result["latent"].values()
    text = FORTY.format(1 - both / sparse, 1 - narrow / wide, 1 - both / wide, sparse / wide - 1)
    latent = []
    for name, n in result["latent"].items():
        latent.append([name, n, f"{n / wide:.3f}", f"{61 * result['tokens'] * n / 1e9:.2f}"])
    return [
        LONG.format(result["tokens"], worst),
        *nested_table("MB", cells),
        text,
        *markdown(["DeepSeek-V3.2", "bytes a token and layer", "share", "GB, 61 layers"], latent),
    ]


def simulator_lines(scale: dict) -> list[str]:
    rows = []
    for row in scale["published"]:
        published = row["published"]
        predicted = row["utilisation"] if "%" in published else f"{row['speed_up']:.2f}x"
        rows.append([row["what"], published, predicted])
    return [SIMULATED, *markdown(["system", "published", "predicted"], rows)]


def disk_lines(result: dict) -> list[str]:
    """How the commands on each kind of run folder ended."""
    rows = []
    for kind in ("damaged", "killed", "hostile"):
        rows.append([kind, result[kind]["said"], len(result[kind]["wrong"])])
    return markdown(["run folders", "how it ended", "otherwise"], rows)


def cluster_lines(result: dict) -> list[str]:
    """What Ray costs, and what runs on three nodes have survived; see lab/clusters.py."""
    rows, names = [], ("message_ms", "publish_ms", "adopted_ms")
    for row in result["costs"]:
        rows.append([row["size"], row["by"], *[f"{row[name]['median']:.1f}" for name in names]])
    head = ["size", "by", "message there and back, ms", "publish, ms", "published and read, ms"]
    losses = result["losses"]
    solved = between(column(losses["runs"], "solved"), ".0%")
    text = ", ".join(f"{count} {kind}" for kind, count in losses["kinds"].items())
    text = f"""
Three nodes, 4 rollout and 2 reward actors: {losses["losses"]} losses on purpose ({text}) in
{len(losses["runs"])} runs: {losses["lost"]} groups lost, {losses["duplicated"]} trained twice,
{len(losses["failures"])} runs that failed. Solved at their ends (small groups): {solved}.
"""
    return [*markdown(head, rows), text]


def once_lines() -> list[str]:
    """What was measured, and need not be measured again."""
    return [ONCE.rstrip()]


def machine_lines() -> list[str]:
    """Which figures come from which machine."""
    found = defaultdict(list)
    for path in sorted(RESULTS.glob("*.json")):
        machine = load_result(path.stem).get("machine")
        if machine:
            gpus = "".join(f"one {name} and " for name in machine["gpus"])
            where = f"{gpus}{machine['cores']} cores of {machine['cpu']}, "
            where += f"Python {machine['python']}, torch {machine['torch']}"
            found[where].append(path.stem)
    return [f"- {', '.join(names)}: {where}" for where, names in found.items()]


SECTIONS = {  # title: (what writes it, the files that it reads)
    "One GPU": (part_lines, "gpu"),
    "Kernels: are they right?": (error_lines, "kernels"),
    "Default flags": (task_lines, "tasks"),
    "Tasks with turns": (agent_lines, "agents"),
    "Synchronous against asynchronous": (race_lines, "race"),
    "The same with model `medium` on one GPU that both roles share": (race_lines, "async-cuda"),
    "Staleness": (staleness_lines, "staleness"),
    "What helps on stale data": (method_lines, "methods"),
    "Attempts until a run converges": (attempt_lines, "attempts"),
    "A teacher": (distil_lines, "distil"),
    "A learned judge": (judge_lines, "judge"),
    "Faults and replay": (fault_lines, "faults", "replay"),
    "Workers on a Ray cluster": (cluster_lines, "cluster"),
    "Run folders: damaged, killed, hostile": (disk_lines, "disk"),
    "A Hugging Face folder learns": (folder_lines, "folder"),
    "Sparse attention: training it": (recipe_lines, "recipe"),
    "Sparse attention: decoding on one CPU thread": (decode_lines, "decode-cpu"),
    "Sparse attention: decoding on a GPU": (decode_lines, "decode-cuda"),
    "Sparse attention: kernels on a GPU": (kernel_lines, "dsa-cuda"),
    "A model of Qwen3's form": (qwen_lines, "qwen"),
    "Memory at 128k tokens": (memory_lines, "memory"),
    "The simulator": (simulator_lines, "scale"),
    "Measured once": (once_lines,),
    "Machines": (machine_lines,),
}
