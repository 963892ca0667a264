"""exam.py: how good a policy is, with the task's code in a process of its own.

`evaluate` runs where the weights are changed, so it cannot race with training. A task that hangs in
C, forks or ends its process must not do so there: a pool of its own has it (runtime/verifier.py).
"""

from collections import defaultdict
from dataclasses import replace
from operator import ge
from statistics import fmean

from reward import Task, problem_of
from rollout import generate, make_generator
from runtime.config import Config
from runtime.messages import Answer, Group, apply_judgement
from runtime.pool import Pool


def evaluate(learner, config: Config, task: Task, pool: Pool) -> dict:
    """A greedy answer to every held-out problem, by the weights as they are between two steps.

    Returns `solved` (share), `reward` (mean) and `turns` (mean); a failed episode counts as a
    reward of 0, and `failures` has the words of the first of each kind. With several tasks these
    are of all problems, and `tasks` has those of each.
    """
    greedy = replace(
        config,
        group_size=1,
        temperature=0.0,
        top_p=1.0,
        seed=~config.seed,  # of no run
        slots=min(config.slots, task.eval_size),
    )
    groups = [Group(i, 0, problem_of(task, i, "eval")) for i in range(task.eval_size)]
    groups = generate(make_generator(greedy, task, learner.model, outside=True), groups, pool)
    pool.verify(groups)
    left = {group.group_id: group for group in groups}
    while left:
        for _, message in pool.receive(0.5):
            if isinstance(message, Answer):
                apply_judgement(left.pop(message.group_id), message.judgement)
    by_task = defaultdict(list)
    for group in groups:
        by_task[group.problem.get("_task")].append(group)
    result = result_of(task, groups)
    if len(by_task) > 1:
        result["tasks"] = {name: result_of(task, groups) for name, groups in by_task.items()}
    return result


def result_of(task: Task, groups: list[Group]) -> dict:
    """What the part of an evaluation that is one task's says."""
    episodes = [group.trajectories[0] for group in groups]
    rewards = [0.0 if t.failed else t.reward for t in episodes]
    needed = [group.problem.get("_solved", task.solved) for group in groups]
    return {
        "solved": fmean(map(ge, rewards, needed)),
        "reward": fmean(rewards),
        "turns": fmean(len(t.turns) for t in episodes),
        "failures": {t.finish: t.failure for t in reversed(episodes) if t.failed},
    }
