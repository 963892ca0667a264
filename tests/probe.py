"""Both roles, one after the other, on one thread: `python probe.py TASK` prints tokens a second.

`bench.py roles` feeds it to the Python of this tree and of an older one, so it only uses names
that both have. Times are CPU seconds of the process: other processes disturb them least.
"""

import dataclasses
import json
import sys
import time

import torch

sys.path.insert(0, "")  # the tree in which it runs, not the one in which it lies

import learner as room
from learner import learner_step
from reward import score
from rollout import generate
from runtime.config import Config
from runtime.messages import apply_verdicts
from runtime.setup import make_generator, make_learner, make_task

WARM_UP, MEASURED = 2, 10


def main(task_name: str) -> None:
    torch.set_num_threads(1)
    config = dataclasses.replace(Config(), task=task_name, steps=300)
    task = make_task(config)
    learner = make_learner(config, task, "cpu")
    generator = make_generator(config, task, learner.model)
    seconds, tokens = {"generator": 0.0, "learner": 0.0}, 0
    for step in range(WARM_UP + MEASURED):
        begin = time.process_time()
        generator.set_weights(learner.version, None)
        groups = generate(generator, room.new_groups(learner, task, config.groups_per_step))
        generated = time.process_time()
        for group in groups:
            apply_verdicts(group, score(group, task, config))
        verified = time.process_time()
        metrics = learner_step(learner, groups, config)
        if step >= WARM_UP:
            seconds["generator"] += generated - begin
            seconds["learner"] += time.process_time() - verified
            tokens += metrics["tokens"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        learner_step(learner, groups, config)
    times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    shares = {name: round(t / sum(times.values()), 3) for name, t in times.items()}
    top = dict(sorted(shares.items(), key=lambda item: -item[1])[:6])
    rates = {role: tokens / s for role, s in seconds.items()}
    print(json.dumps({"tokens_per_s": rates, "learner_profile": top}))


main(sys.argv[1])
