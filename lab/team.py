"""team.py: a training step of several learners, each in a process with one CPU thread.

`python bench.py learners` runs it: the same batches, in turn with one and with more learners; how
long a step takes, and which share of it the learners spend in their meetings (waiting included).
Processes stand in for GPUs: a learner for each core.
Left out: generation; a run of several learners is `python train_async.py --learners N`.
"""

import dataclasses
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.plots import column, print_table, save_result, spread
from learner import learner_step, make_learner
from reward import Task, task_of
from runtime.checkpoint import share, state_of, whole_moments
from runtime.config import Config
from runtime.devices import cores, describe_machine
from runtime.messages import Group, Trajectory
from runtime.models import make_model
from runtime.team import join_team, leave_team

GROUPS, ANSWERS, STEPS = 4, 8, 3
LENGTHS = 48, 240  # of answers, log-uniform


def made_up(config: Config, task: Task, alphabet: torch.Tensor) -> list[Group]:
    """Groups of random answers with random rewards: a step costs what it costs with real ones."""
    random, groups = np.random.default_rng(0), []
    for number in range(config.groups_per_step):
        group = Group(number, 0, task.reset(number, "train"))
        for sample in range(config.group_size):
            T = int(np.exp(random.uniform(*np.log(LENGTHS))))
            t = Trajectory(number, sample, 0)
            t.tokens = random.choice(alphabet.numpy(), T).astype(np.int32)
            t.loss_mask = np.arange(T) >= 8
            t.logprobs = np.where(t.loss_mask, -2.0, 0.0).astype(np.float32)
            t.versions = np.where(t.loss_mask, 0, -1).astype(np.int32)
            t.turns, t.reward = [(8, T)], float(random.integers(2))
            group.trajectories.append(t)
        groups.append(group)
    return groups


def member(rank: int, config: Config, folder: str) -> tuple:
    """One learner: (seconds, seconds in meetings) of each step, and the bytes of a gradient."""
    torch.set_num_threads(1)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task), (rank,))
    team, rows = learner.team, []
    if team.size > 1:
        state = None if rank else state_of(learner, whole_moments(learner))
        join_team(team, f"file://{folder}/meeting", own_gpus=False, limit=300.0)
        share(learner, state)
    groups = made_up(config, task, learner.alphabet)
    for _ in range(1 + STEPS):  # the first one warms up
        begin, before = time.perf_counter(), team.seconds
        learner_step(learner, groups, config)
        rows.append((time.perf_counter() - begin, team.seconds - before))
    leave_team(team)
    return rows[1:], learner.weights.nbytes


def run_team(config: Config) -> tuple:
    """As many processes as there are learners; returns what rank 0 has found."""
    ranks = range(config.team_size)
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(len(ranks), get_context("spawn")) as processes:
            found = [processes.submit(member, rank, config, folder) for rank in ranks]
            return [one.result(timeout=300) for one in found][0]


def bench_learners(folder: Path, rounds: int = 3) -> None:
    """Models `small` and `medium`, 1 and as many learners as there are cores (at most 4), in turn;
    learners.json in `folder`."""
    sizes = [1, min(4, max(2, cores()))]
    plan = [(model, size) for _ in range(rounds) for model in ("small", "medium") for size in sizes]
    seconds, meetings, rows = {}, {}, []
    alike = {"task": "sum", "groups_per_step": GROUPS, "group_size": ANSWERS}
    alike |= {"token_budget": 1024, "reference_every": 0}
    for model, size in tqdm(plan, unit="team"):
        config = dataclasses.replace(Config(), model=model, learners=size, **alike)
        found, weights = run_team(config)
        seconds.setdefault((model, size), []).extend(column(found, 0))
        meetings.setdefault((model, size), []).extend([b / a for a, b in found])
        mine = seconds[model, 1], seconds[model, size]
        row = {"model": model, "learners": size, "gradient_mb": weights / 1e6}
        row |= {"step_s": spread(mine[1]), "in_meetings": spread(meetings[model, size])}
        row["speed_up"] = float(np.median(mine[0]) / np.median(mine[1]))
        rows = [r for r in rows if (r["model"], r["learners"]) != (model, size)] + [row]
        save_result(folder, "learners", {"machine": describe_machine(), "rows": rows})
    print_table(rows)
