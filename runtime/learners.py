"""learners.py: the learners of a run begin together, and begin again when one of them is lost.

One that has died or hangs has taken its slice of the optimizer's moments along (team.py). So all go
back to the newest checkpoint and take the steps since then again, with the batches that the parent
has kept since: they reach the same weights (on a CPU bitwise), and so nothing else has to go back.
Rollout workers keep their episodes, versions and staleness stay true, no group is trained twice.
What it costs is the time of those steps. One learner has no team: there is nothing to lose.
Left out: what the learners do together (team.py), who notices a death (processes.py).
"""

import time
from functools import partial

from learner import learner_step
from runtime.checkpoint import (
    checkpoint,
    load_checkpoint,
    set_state,
    share,
    state_of,
    whole_moments,
)
from runtime.config import TrainingStopped
from runtime.devices import own_gpus
from runtime.messages import Group
from runtime.run import AsyncRun, log_spawn
from runtime.team import LEARNER_SECONDS, Begin, Parted, join_team, leave_team


def open_team(run: AsyncRun) -> None:
    """At the beginning of a run: all learners get what this one has."""
    try:
        team_of(run, run.state or state_of(run.learner, whole_moments(run.learner)))
    except Parted as error:
        begin_again(run, error)


def team_of(run: AsyncRun, state: dict) -> None:
    """Wait until all learners are there, and meet; Parted: one has died, or does not come."""
    workers, team = run.pool.of("learner"), run.learner.team
    while any(worker.said == "spawn" for worker in workers):
        run.log.alive()
        time.sleep(0.05)
        for worker in workers:
            if worker.gone:
                raise Parted(f"{worker.name} {worker.gone}")
    team.others = [partial(run.pool.send, worker) for worker in workers]
    begin = Begin(run.meeting_place(), own_gpus(run.config))
    for worker in workers:
        run.pool.send(worker, [begin])
    join_team(team, *begin, LEARNER_SECONDS)
    share(run.learner, state)


def send_batch(run: AsyncRun, batch: list[Group]) -> None:
    """The other learners get the batch that this one is about to train."""
    for worker in run.pool.of("learner"):
        run.pool.send(worker, batch)


def note_step(run: AsyncRun, batch: list[Group], metrics: dict) -> None:
    """A step is done: it is kept until the next checkpoint."""
    if run.learner.team.size > 1:
        run.since.append((batch, metrics))


def save(run: AsyncRun) -> None:
    """A checkpoint; when a learner is lost in the middle of it, all begin again first."""
    while True:
        try:
            completed = run.buffer.completed.values()
            checkpoint(run.learner, run.folder, run.log, run.in_flight, completed)
            return run.since.clear()
        except Parted as error:
            begin_again(run, error)


def begin_again(run: AsyncRun, error: Parted) -> None:
    """Replace all other learners, and take the steps since the newest checkpoint once more.

    TrainingStopped: that has happened too often, or there is no checkpoint to go back to.
    """
    learner, log = run.learner, run.log
    version, cursors, begun = learner.version, learner.cursors, learner.begun
    with log.timed("learner", "again", version=version, steps=len(run.since)) as event:
        while error:
            replace_learners(run, error)
            try:
                same, error = redo(run, version), None
            except Parted as another:
                error = another
        event["same"] = same  # loss and gradient of every step
    assert learner.version == version, (learner.version, version)
    learner.cursors, learner.begun = cursors, begun  # prompts up to here are issued already
    log.say(f"all learners have begun again, and are at step {version}")


def replace_learners(run: AsyncRun, error: Parted) -> None:
    """End all other learners, say why, and start as many."""
    leave_team(run.learner.team)
    old = run.pool.of("learner")
    run.pool.renew("learner", str(error))
    lost = [f"{worker.name} {worker.gone}" for worker in old if worker.gone] or [str(error)]
    run.lost += lost
    for text in lost:
        run.log.say(f"{text}: all learners begin again")
    for worker in old:
        run.log.event(worker.name, "exit", reason=worker.gone or "another was lost")
        log_spawn(run, run.pool.workers[worker.name])


def redo(run: AsyncRun, version: int) -> bool:
    """From the newest checkpoint to this version; returns whether each step was as before."""
    learner, state, same = run.learner, load_checkpoint(run.folder), True
    if state["version"] + len(run.since) != version:
        raise TrainingStopped(f"the newest checkpoint that is whole is of step {state['version']}")
    set_state(learner, state)
    team_of(run, state)
    for batch, before in run.since:
        run.log.alive()
        send_batch(run, batch)
        after = learner_step(learner, batch, run.config)
        same &= all(repr(after[name]) == repr(before[name]) for name in ("loss", "grad_norm"))
    return same
