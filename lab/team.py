"""team.py: a training step of several learners, each in a process with one CPU thread.

`python bench.py learners` runs it: the same batches, in turn with one and with more learners; how
long a step takes, and which share of it the learners spend in their meetings (waiting included).
Processes stand in for GPUs: a learner for each core.
Left out: generation; a run of several learners is `python train_async.py --learners N`.
"""

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab.players import episodes
from lab.plots import column, save_result, spread
from learner import learner_step, make_learner
from reward import task_of
from runtime.checkpoint import share, state_of, whole_moments
from runtime.config import Config
from runtime.devices import cores
from runtime.messages import Group
from runtime.models import make_model
from runtime.team import join_team

ALIKE = {"task": "sum", "groups_per_step": 4, "group_size": 8}
ALIKE |= {"token_budget": 1024, "reference_every": 0}
TOKENS, STEPS = 130, 3  # of an answer, about; that are timed in a process


def made_up(config: Config, alphabet: np.ndarray) -> list[Group]:
    """Groups of random answers with random rewards: a step costs what it costs with real ones."""
    random, n = np.random.default_rng(0), config.group_size
    whole = episodes(0, {}, config.groups_per_step * n, TOKENS).trajectories
    for t in whole:  # equal ones would be computed once
        t.tokens = random.choice(alphabet, len(t.tokens)).astype(np.int32)
        t.reward = float(t.sample_index % 2)
    return [Group(i, 0, {}, whole[i * n : (i + 1) * n]) for i in range(config.groups_per_step)]


def member(rank: int, config: Config, folder: str) -> list[tuple]:
    """One learner: seconds of each step, and which share of them went into meetings."""
    torch.set_num_threads(1)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task), (rank,))
    team, rows = learner.team, []
    if team.size > 1:
        state = None if rank else state_of(learner, whole_moments(learner))
        join_team(team, f"file://{folder}/meeting", own_gpus=False, limit=300.0)
        share(learner, state)
    groups = made_up(config, learner.alphabet.numpy())
    for _ in range(1 + STEPS):  # the first one warms up
        begin, before = time.perf_counter(), team.seconds
        learner_step(learner, groups, config)
        seconds = time.perf_counter() - begin
        rows.append((seconds, (team.seconds - before) / seconds))
    return rows[1:]


def run_team(config: Config) -> list[tuple]:
    """As many processes as there are learners; returns what rank 0 has found."""
    ranks = range(config.team_size)
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(len(ranks), get_context("spawn")) as processes:
            arguments = ranks, repeat(config), repeat(folder)
            return list(processes.map(member, *arguments, timeout=300))[0]


def bench_learners(folder: Path) -> None:
    """Models `small` and `medium`, 1 and as many learners as there are cores (at most 4), in turn;
    learners.json in `folder`."""
    cases = list(product(("small", "medium"), (1, min(4, max(2, cores())))))
    found = {case: [] for case in cases}
    for model, size in tqdm(cases * 3, unit="team"):
        found[model, size] += run_team(Config(model=model, learners=size, **ALIKE))
    rows = []
    for (model, size), steps in found.items():
        seconds, meetings = zip(*steps, strict=True)
        alone = np.median(column(found[model, 1], 0))
        row = {"model": model, "learners": size, "step_s": spread(seconds)}
        row |= {"in_meetings": spread(meetings), "speed_up": float(alone / np.median(seconds))}
        rows.append(row)
    save_result(folder, "learners", {"rows": rows})
