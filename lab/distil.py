"""distil.py: a skill that was lost comes back from a teacher; what a learned judge is worth.

`python bench.py distil`: a policy learns `reverse`, then `sort`, which costs it the first skill;
then it is asked to be its own earlier self on prompts of `reverse`, one answer to a prompt and no
reward (cross-stage distillation, as in GLM-5). The same number of episodes with rewards and without
a teacher is the baseline. Asynchronous runs; held-out problems.
`python bench.py judge`: `reverse` with a reward model in place of the task. Policies learn what
their judge believes, also of answers that no pair has shown it; the task says what is true.
Left out: what is trained (learner.py), who asks the teacher (runtime/teacher.py).
"""

from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.plots import between, markdown, median_text, save_result
from lab.races import run_command, run_each
from reward_model import PairConfig, train
from runtime.pictures import column, grouped, steps_of

ALIKE = {"lr": 1.2e-3, "groups_per_step": 16, "eval_every": 1000, "reward_workers": 1}
JUDGES = {"the task itself": "", "a reward model, pairs of nearly the right length": "near"}
JUDGES |= {"a reward model, pairs of any length": "any"}


def stages(folder: Path, seed: int) -> dict:
    """{name: flags} of the runs, in order; each begins where another has ended."""
    run = {x: str((folder / f"{seed}-{x}").resolve()) for x in ("reverse", "sort", "taught")}
    again = {"task": "reverse", "steps": 120, "init": run["sort"]}
    one = {"group_size": 1, "groups_per_step": 256}  # as many episodes
    taught = again | one | {"teacher": run["reverse"]}
    plan = {
        "reverse": {"task": "reverse", "steps": 150},
        "sort": {"task": "sort", "steps": 300, "init": run["reverse"]},
        "taught": taught,
        "fresh": taught | {"max_staleness": 0},  # on data that are never old
        "alone": again,
        # only its evaluation counts
        "sort after": {"task": "sort", "steps": 1, "lr": 0.0, "init": run["taught"]},
    }
    return {f"{seed}-{name}": flags | {"seed": seed} for name, flags in plan.items()}


def bench_distil(folder: Path) -> None:
    """The stages, three times; distil.json."""
    result = {"runs": []}
    for seed in range(3):
        row = {"seed": seed}
        for name, _, summary in run_each(stages(folder, seed), folder, keep=True, **ALIKE):
            row[name.partition("-")[2]] = summary["eval"]
        result["runs"].append(row)
        save_result(folder, "distil", result)


# ---- a learned judge


def bench_judge(folder: Path) -> None:
    """Reward models from two kinds of pairs, and what is learned from each; judge.json."""
    result = {"runs": []}
    for seed, (judge, lengths) in tqdm([*product(range(3), JUDGES.items())], unit="run"):
        row = {"seed": seed, "judge": judge, "right": 1.0}
        flags = ALIKE | {"task": "reverse", "seed": seed, "steps": 150}
        if lengths:
            judges = folder / f"judges-{seed}-{lengths}"
            row["right"] = train(PairConfig("reverse", str(judges), seed=seed, lengths=lengths))
            flags["reward_model"] = judges.resolve()
        run = folder / f"{seed}-{lengths or 'task'}"
        row["true"] = run_command("train_async.py", run, **flags)["eval"]["after"]["reward"]
        row["believed"] = float(np.mean(column(steps_of(run)[-10:], "reward")))
        result["runs"].append(row)
        save_result(folder, "judge", result)


def judge_lines(result: dict) -> list[str]:
    """What policies believe of their answers, and what these are worth."""
    rows = []
    for judge, runs in grouped(result["runs"], "judge").items():
        names = ("right", "believed", "true")
        rows.append([judge, *(between(column(runs, name), ".2f") for name in names)])
    text = f"""\
`reverse`, 150 steps, {len(runs)} seeds, smallest to largest. Believed: the mean reward that the
judge gave to sampled answers of the last 10 steps; true: what the task says of greedy ones to
problems that are held out.
"""
    return [text, *markdown(["judge", "pairs judged rightly", "believed", "true"], rows)]


# ---- a teacher's table


def distil_lines(result: dict) -> list[str]:
    """Scores of the lost skill, and of the one that was learned after it."""
    stages = {
        "`reverse`, the teacher": ("reverse", "after"),
        "`reverse`, when `sort` was learned": ("taught", "before"),
        "`reverse`, taught": ("taught", "after"),
        "`reverse`, taught at staleness 0": ("fresh", "after"),
        "`reverse`, the same episodes with rewards": ("alone", "after"),
        "`sort`, before it was taught": ("sort", "after"),
        "`sort`, after `reverse` was taught": ("sort after", "before"),
    }
    rows = []
    for name, (run, when) in stages.items():
        exams = column(column(result["runs"], run), when)
        rows.append([name, *(median_text(column(exams, x), ".2f") for x in ("reward", "solved"))])
    text = f"{len(result['runs'])} seeds, median and extremes of held-out scores.\n"
    return [text, *markdown(["", "reward", "solved"], rows)]
