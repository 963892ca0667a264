"""tables.py: docs/measured.md, written from what is recorded in results/*.json.

Run: `python bench.py tables`; a test compares the page with `measured_page`. A table of runs is
data: which runs make a row, and what is told of them. Others are made beside their measurement.
Left out: measuring, and pictures (plots.py).
"""

import math
from collections import defaultdict
from functools import partial
from pathlib import Path

from lab.campaigns import PARTS
from lab.plots import RESULTS, between, column, grouped, load_result, median_text, table
from lab.races import race_lines
from lab.recipe import recipe_lines
from lab.stale import method_lines

PAGE = RESULTS.parent / "docs" / "measured.md"

# ------------------------------------------------------------------------------ tables as data


def pick(row: dict, path: str):
    """row["a"]["b"] by "a.b": how many of a list, the counts of a dict; nan where it is missing,
    inf where there is None: not reached."""
    for key in path.split("."):
        row = row.get(key, math.nan) if isinstance(row, dict) else math.nan
    if isinstance(row, dict):
        return ", ".join(f"{count} {name}" for name, count in row.items())
    return len(row) if isinstance(row, list) else math.inf if row is None else row


def told(rows: list[dict], what: str) -> str:
    """What rows have, "a.b FORM", from the lowest to the highest; with "~" before it, the median
    of it."""
    path, _, form = what.removeprefix("~").partition(" ")
    return (median_text if what[0] == "~" else between)([pick(row, path) for row in rows], form)


def run_lines(by: str, columns: dict, text: str, result: dict, of: str = "runs") -> list[str]:
    """A row for the runs with the same `by`, {column: what is told}; those that have nothing for
    the first column are left out."""
    runs = result[of]
    if isinstance(runs, dict):
        runs = [{"name": name} | run for name, run in runs.items()]
    first = next(iter(columns.values())).strip("~").split(" ")[0]
    named = []
    for run in runs:
        if pick(run, first) is not math.nan:
            named.append({"row": pick(run, by), "run": run})
    cells = []
    for name, rows in grouped(named, "row").items():
        cells.append((name, "runs", len(rows)))
        cells += [(name, head, told(column(rows, "run"), what)) for head, what in columns.items()]
    return [f"{text}\n", *table("", cells)]


def fact_lines(facts: dict, result: dict) -> list[str]:
    """A row for each fact of one measurement, {its name: what is told}."""
    return table("", [(name, "", told([result], what)) for name, what in facts.items()])


def row_lines(text: str, result: dict, of: str = "rows") -> list[str]:
    """Rows as they stand in a measurement, of repeated numbers the median; and a note on them."""
    rows, cells = result[of], []
    if isinstance(rows, dict):
        rows = [{"name": name} | row for name, row in rows.items()]
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            value = value["median"] if isinstance(value, dict) else value
            cells.append((number, name, f"{value:,.4g}" if isinstance(value, float) else value))
    note = f"{text}\n{{note}}" if "note" in result else text
    return [f"{note.format(**result)}\n", *table("", cells)]


TASK = {"steps": "steps", "solved before": "eval.before.solved .0%"}
TASK |= {"solved": "eval.after.solved .1%", "seconds": "command_s .0f"}
AGENT = {"episodes to the goal": "~goal_samples ,.0f", "seconds to it": "~goal_s .0f"}
AGENT |= {"solved": "eval.after.solved .0%", "seconds in all": "command_s .0f"}
MIXTURE = {f"`{task}`": f"eval.after.tasks.{task}.solved .1%" for task in PARTS}
SMOLLM2 = {"before": "before .0%", "solved": "solved .0%", "minutes": "minutes .1f"}
SMOLLM2 |= {"seconds a step": "step_s .1f", "the same by transformers": "same_answers"}
FAULTS = {
    "faults injected": "faults",
    "runs of all roles": "runs",
    "runs that hung, or ended without naming an error": "failures",
    "groups lost": "lost",
    "groups trained twice": "duplicated",
    "how runs ended, by name": "ends",
    "groups made again": "requeued",
    "until a dead worker is named (s)": "noticed_after_s.dead.median .2f",
    "... at most": "noticed_after_s.dead.max .2f",
    "until a silent one is": "noticed_after_s.stopped.median .1f",
    "... at most ": "noticed_after_s.stopped.max .1f",
    "longest time without a step (s)": "no_progress_s .1f",
    "kills in the middle of a checkpoint": "checkpoint_kills.kills",
    "weights at the end as without kills": "checkpoint_kills.bitwise_equal",
}
DISK = {}
for folders in ("damaged", "killed", "hostile"):
    DISK |= {folders: f"{folders}.said", f"{folders}, otherwise": f"{folders}.wrong"}

SOLVED = "Solved: the number was found within 6 guesses, or an answer has no mistake (greedy)."
GOALS = """\
Solved: held out, greedy. The goal is a share solved of 95% (`hops`), 80% (`debug`: lab/debug.py),
90% (`guess`). Medians over the seeds, and from lowest to highest; inf: a run that ended below the
goal. What has fewer than five seeds ran beside other programs: its seconds say nothing."""
TOGETHER = "Solved, in one run with `--ratio 2,1,1`. Alone: see above; `reverse:6` 99.6% to 100.0%."
OLDEST = "`sum`, over all three swap modes, in versions; a row a bound."
AGAIN = "Runs of 50 steps, played again from their event logs: are the weights the same?"
LEARNS = """\
SmolLM2-135M-Instruct, sums of two numbers of two digits, 30 steps of 128 answers. Prompts whose
answers are all wrong or all right are replaced by others: synchronously up to 48 in a step,
asynchronously also those that were under way when a step was made."""


DECODING = "Model: {model}; {slots} slots with full caches."
ATTENTION = """\
Selection included; query heads, key heads and their width: {heads}, {dtype}. Lists have 16 chunks
of 64 where nothing else is said. "Over": times as fast as dense attention by PyTorch's backend.
The table published with NSA kernels in Triton (H100, 64 query heads, 4 key heads, selection
excluded, forward+backward against FlashAttention-2) goes from 1.6× at 8k to 20.7× at 128k; nearest
to its terms is query block 1 over FLASH_ATTENTION."""
ERRORS = """\
Against `dsa.py` in float64, of the same lists: the largest difference in output or gradients, over
the largest number there."""
QWEN = "Qwen3's form, {size}, random, {dtype}."


def machine_lines() -> list[str]:
    """Which figures come from which machine."""
    names = defaultdict(list)
    for path in sorted(RESULTS.glob("*.json")):
        if machine := load_result(path.stem).get("machine"):
            gpus = "".join(f"one {name} and " for name in machine["gpus"])
            where = f"{gpus}{machine['cores']} cores of {machine['cpu']}, "
            names[where + "Python {python}, torch {torch}".format(**machine)].append(path.stem)
    return [f"- {', '.join(files)}: {where}" for where, files in names.items()]


SECTIONS = {  # title: (the file that is read, what writes of it)
    "One GPU": ("gpu", partial(row_lines, "A rehearsal says nothing: {rehearsal}.", of="parts")),
    "Kernels: are they right?": ("kernels", partial(row_lines, ERRORS)),
    "Default flags": ("tasks", partial(run_lines, "task", TASK, SOLVED)),
    "Tasks with turns": ("agents", partial(run_lines, "arm", AGENT, GOALS)),
    "Several tasks in one run": ("agents", partial(run_lines, "arm", MIXTURE, TOGETHER)),
    "Synchronous against asynchronous": ("race", race_lines),
    "The same with model `medium` on one GPU that both roles share": ("async-cuda", race_lines),
    "Staleness": (
        "staleness",
        partial(
            run_lines, "staleness.bound", {"oldest token ever trained": "staleness.max"}, OLDEST
        ),
    ),
    "What helps on stale data": ("methods", method_lines),
    "Faults": ("faults", partial(fact_lines, FAULTS)),
    "Replay": ("replay", partial(run_lines, "same", {"staleness bound": "max_staleness"}, AGAIN)),
    "Run folders: damaged, killed, hostile": ("disk", partial(fact_lines, DISK)),
    "Published weights learn": ("smollm2-cpu", partial(run_lines, "arm", SMOLLM2, LEARNS)),
    "... on a GPU": ("smollm2-cuda", partial(run_lines, "arm", SMOLLM2, LEARNS)),
    "Sparse attention: training it": ("recipe", recipe_lines),
    "Sparse attention: decoding on one CPU thread": ("decode-cpu", partial(row_lines, DECODING)),
    "Sparse attention: decoding on a GPU": ("decode-cuda", partial(row_lines, DECODING)),
    "Sparse attention: kernels on a GPU": ("dsa-cuda", partial(row_lines, ATTENTION)),
    "A model of Qwen3's form": ("qwen", partial(row_lines, QWEN)),
}


# ----------------------------------------------------------------------------------- the page


def tables_of(folder: Path) -> list[str]:
    """What the page says of the files in the folder of a measurement."""
    lines = []
    for title, (file, section) in SECTIONS.items():
        if (folder / f"{file}.json").exists():
            lines += ["", f"## {title}", "", *section(load_result(file, folder))]
    return lines


def measured_page() -> str:
    """The page, section by section."""
    claims, once = ((RESULTS / f"{name}.md").read_text() for name in ("claims", "once"))
    return "\n".join(
        [claims, *tables_of(RESULTS), "", once, "## Machines", "", *machine_lines(), ""]
    )


def write_tables() -> str:
    """Write the page; returns where it is."""
    PAGE.write_text(measured_page())
    return str(PAGE.relative_to(RESULTS.parent))
