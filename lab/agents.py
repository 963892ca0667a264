"""agents.py: tasks with turns: are they learned, and what do credit by turn, a critic, failures of
the environment and several tasks in one run change?

    python bench.py agents             # every arm; `agent_plan` is the plan

An arm is a set of flags with several seeds. Left out: what the estimators are biased by
(exact_turns.py).
"""

from collections import Counter
from pathlib import Path

from lab.campaigns import campaign_runs
from lab.plots import between, markdown, median_text
from lab.races import ROOT, crossing, exams_of, reached
from runtime.pictures import column, grouped

AGENTS = ("hops:3", "hops:3:0.05", "debug")  # the second: a tool that fails in 5% of the turns
GOALS = {"hops:3": 0.95, "hops:3:0.05": 0.95, "debug": 0.8, "guess": 0.9}  # held out, solved
TURNS = {"credit": "turn"}
CRITIC = {"advantage": "gae", "group_size": 1, "groups_per_step": 512}  # as many episodes a step
PARTS = ("guess", "reverse:6", "hops:3")
MIXED = {"task": ",".join(PARTS), "ratio": "2,1,1"}  # as many groups of hops:3 as alone
# {arm: flags}; an arm's name begins with its task
FIVE_SEEDS = {"hops:3": {}, "debug": {}, "hops:3:0.05": {}}
FIVE_SEEDS |= {"hops:3, credit by turn": TURNS, "debug, credit by turn": TURNS}
THREE_SEEDS = {task: {} for task in PARTS} | {"mixture": MIXED}
THREE_SEEDS |= {"guess, critic": CRITIC, "hops:3, critic": CRITIC}
SLOW = {"steps": 6, "groups_per_step": 4, "max_failures": 1}  # most groups lose a sample
READING = """\
Solved: held out, greedy. The goal is a share solved of 95% (`hops`), 80% (`debug`), 90% (`guess`).
Medians over the seeds, and from lowest to highest; inf: a run that ended below the goal. What has
fewer than five seeds ran beside other programs: its seconds say nothing."""


def agent_plan(folder: Path) -> dict[str, dict]:
    """{name: flags}: seed after seed, so that slow minutes hit all arms alike."""
    once = {}
    for faults in ("no", "yes"):
        (folder / faults).mkdir(parents=True)
        spec = f"{ROOT}/tests/slow.py:0.2,{faults},{(folder / faults).resolve()}"
        once[f"slow, faults: {faults}"] = {"task": spec} | SLOW
    plan = {}
    for seed in range(5):
        arms = FIVE_SEEDS | (THREE_SEEDS if seed < 3 else {}) | (once if seed == 0 else {})
        for arm, flags in arms.items():
            plan[f"{arm}, seed {seed}"] = {"task": arm.partition(",")[0], "seed": seed} | flags
    return plan


def bench_agents(folder: Path) -> None:
    """Every arm: solved before and after, seconds, and episodes to the goal of the task."""
    for label, row, run in campaign_runs(folder, "agents", agent_plan(folder)):
        row["arm"] = label.rpartition(", seed ")[0]
        if goal := GOALS.get(row["task"]):
            row["goal_s"], row["goal_samples"] = crossing(exams_of(run, "solved"), goal)
        if row["arm"] == "slow, faults: yes":
            row["faults"] = Counter((folder / "yes" / "faults").read_text().split())


# ---- for docs/measured.md ----


def agent_lines(result: dict) -> list[str]:
    """Three tables: what is learned, several tasks in one run, a slow environment."""
    arms, rows = grouped(result["runs"], "arm"), []
    for arm, runs in arms.items():
        if "goal_s" in runs[0]:
            cells = [f"{arm}, {len(runs)} seeds", between(solved(runs), ".0%")]
            cells.append(median_text(reached(runs, "goal_samples"), ",.0f"))
            cells.append(median_text(reached(runs, "goal_s"), ".0f"))
            rows.append([*cells, between(column(runs, "command_s"), ".0f")])
    head = ["`--task`", "solved", "episodes to the goal", "seconds to it", "seconds in all"]
    lines = [READING, "", *markdown(head, rows)]
    rows = []
    for task in PARTS:
        together = [row["tasks"][task] for row in arms["mixture"]]
        both = [between(solved(runs), ".1%") for runs in (together, arms[task])]
        rows.append([f"`{task}`", *both])
    head = ["`--ratio 2,1,1`", f"solved in one run, {len(arms['mixture'])} seeds", "alone"]
    lines += ["", *markdown(head, rows)]
    rows = []
    for faults in ("no", "yes"):
        (run,) = arms[f"slow, faults: {faults}"]
        sessions = run["sessions"]["opened"], run["sessions"]["closed"]
        busy = f"{run['utilization']['rollout']:.0%}"
        rows.append([sum(run.get("faults", {}).values()), run["samples"], *sessions, busy])
    head = ["faults in an environment of 200 ms", "episodes trained", "sessions opened", "closed"]
    return [*lines, "", *markdown([*head, "generator busy"], rows)]


def solved(runs: list[dict], when: str = "after") -> list[float]:
    """The shares that were solved before or after training."""
    return [run["eval"][when]["solved"] for run in runs]
