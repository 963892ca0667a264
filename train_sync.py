"""train_sync.py: reinforcement learning, one thing at a time: generate, verify, learn, repeat.

    python train_sync.py                     # guess a number, from random weights
    python train_sync.py --task reverse:6    # --help lists every flag

This is the honest baseline and the place to start reading: `main` is the whole algorithm in one
flat loop. `learner_step` and `evaluate` live here; `train_async.py` imports them and adds only
what asynchrony needs. Left out: set-up and checkpoints (learner.py), processes, queues, staleness
(here it is always 0).
"""

import time
from pathlib import Path

from tqdm import tqdm

from learner import check_step, evaluate, learner_step, new_groups
from reward import score
from rollout import COUNTED, generate
from runtime.checkpoint import checkpoint
from runtime.config import Config, UserError, run_main
from runtime.devices import pick_devices, set_threads
from runtime.messages import apply_verdicts
from runtime.report import facts_of, show_episode, summarise
from runtime.runlog import Stop, append_lines
from runtime.setup import make_generator, open_training, resumed


def after_step(learner, groups, metrics, config, task, run, watch, flying=((), ()), **shown):
    """What follows a step in both trainers: checks, evaluation, samples, checkpoint, metrics."""
    version = learner.version
    due = version % config.eval_every == 0 or version == config.steps
    if due and config.eval_when == "late":
        seconds = round(time.monotonic() - watch.start, 3)
        watch.kept.append((seconds, version, learner.model.flat.clone()))
    elif due:
        result = evaluate(learner, config, task)
        metrics["eval"] = result
        shown["eval"] = f"{result['solved']:.2f}"
    if version % config.samples_every == 0:
        watch.say("\n".join(show_episode(g) for g in groups[:3]))
        samples = [{"version": version, "text": show_episode(g)} for g in groups[:3]]
        append_lines(run / "samples.jsonl", samples)
    watch.step({"step": version, **metrics}, reward=f"{metrics['reward']:.2f}", **shown)
    if version % config.checkpoint_every == 0:  # last: what it resumes from must be complete
        checkpoint(learner, run, watch, *flying)
    check_step(learner, groups, metrics, config, run)


def evaluate_kept(learner, config: Config, task, run: Path, watch) -> None:
    """The evaluations that --eval-when late has put off, when nobody needs the learner any more.

    The weights are kept in memory only: a run that was killed has lost these evaluations.
    """
    for seconds, version, weights in tqdm(watch.kept, "evaluations", disable=not watch.kept):
        learner.model.flat.copy_(weights)
        row = {"t": seconds, "step": version, "eval": evaluate(learner, config, task)}
        append_lines(run / "metrics.jsonl", [row])


def train(config: Config) -> None:
    """The synchronous algorithm: generate, verify, learn, and nothing at the same time."""
    stop, busy = Stop(), {"rollout": 0.0, "learner": 0.0}
    config = resumed(config)
    for flag, only in {"learners": 1, "rollout-weights": "float32"}.items():
        if (value := getattr(config, flag.replace("-", "_"))) != only:  # one process, one model
            raise UserError(f"--{flag} {value}: must be {only} in train_sync.py")
    (device, *_), _ = pick_devices(config)
    set_threads(config, 1, device)
    config, task, run, learner, watch, _ = open_training(config, "sync", device)
    generator = make_generator(config, task, learner.model)

    try:
        while learner.version < config.steps and not stop.asked:
            begin, version, before = time.monotonic(), learner.version, dict(generator.counts)
            generator.set_weights(version, None)
            groups = generate(generator, new_groups(learner, task, config.groups_per_step))
            done = {name: generator.counts[name] - before[name] for name in COUNTED}
            generated = watch.span("rollout-0", "generate", begin, version=version, **done)
            begin = time.monotonic()
            for group in groups:
                apply_verdicts(group, score(group, task, config))
            watch.span("reward-0", "score", begin)
            begin = time.monotonic()
            metrics = learner_step(learner, groups, config)
            busy["learner"] += watch.span("learner", "train", begin, version=version)
            busy["rollout"] += generated
            metrics |= {"staleness_max": 0, "staleness_mean": 0.0}
            rates = {"generate": generated, "learn": metrics["seconds"]}
            rates = {role: f"{metrics['tokens'] / took:.0f}/s" for role, took in rates.items()}
            after_step(learner, groups, metrics, config, task, run, watch, **rates)
    finally:
        watch.bar.close()
        checkpoint(learner, run, watch)
    wall = time.monotonic() - watch.start
    tokens = generator.counts["tokens"]
    facts = facts_of(learner, config, watch) | {
        "staleness_bound": 0,
        "tokens_generated": tokens,
        "rollout_tokens_per_s": round(tokens / max(busy["rollout"], 1e-9)),
        "utilization": {role: seconds / wall for role, seconds in busy.items()},
        "groups": {"admitted": learner.next_group, "trained": learner.next_group, "in_flight": 0}
        | {"discarded": {}, "requeued": 0},
    }
    evaluate_kept(learner, config, task, run, watch)
    print(summarise(run, facts))


if __name__ == "__main__":
    run_main(train, __doc__)
