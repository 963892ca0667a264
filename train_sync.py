"""train_sync.py: reinforcement learning, one thing at a time: generate, verify, learn, repeat.

    python train_sync.py                     # guess a number, from random weights
    python train_sync.py --task reverse:6    # --help-all lists all flags

This is the honest baseline and the place to start reading: `train` is the whole algorithm in one
flat loop. `learner_step` is the one that train_async.py uses, too. Here all data are fresh and
every ratio is 1, so most objectives make the same step; --lr moves the curve.
Left out: processes, queues, staleness (here it is always 0).
"""

from buffer import by_task
from learner import learner_step, new_groups
from rollout import COUNTED, generate, make_generator
from runtime.advice import judge, renew
from runtime.books import close_step, keep
from runtime.checkpoint import checkpoint
from runtime.config import Config, require
from runtime.messages import apply_judgement
from runtime.run import end_run, exit_code, open_run
from runtime.terminal import run_main


def train(config: Config) -> None:
    """The synchronous algorithm: generate, verify, learn, and nothing at the same time."""
    learners, weights = config.learners, config.rollout_weights  # one process, one model
    require(learners < 2, f"--learners {learners}: must be 1 in train_sync.py")
    said = f"--rollout-weights {weights}: must be float32 in train_sync.py"
    require(weights == "float32", said)
    run = open_run(config, "sync")
    config, task, learner, log = run.config, run.task, run.learner, run.log
    generator = make_generator(config, task, learner.model)

    try:
        while learner.version < config.steps and not run.stop.asked:
            version, batch, missing = learner.version, [], task.shares
            generator.set_weights(version, learner.model.flat)  # already its own; LoRA: to merge
            while any(missing):  # more than once only where groups are discarded
                log.alive()
                before = generator.counts.copy()
                with log.timed("rollout-0", "generate", version=version) as span:
                    prompts = [new_groups(learner, task, n, kind) for kind, n in enumerate(missing)]
                    groups = generate(generator, sum(prompts, []), run.host)
                    span |= {name: generator.counts[name] - before[name] for name in COUNTED}
                with log.timed("reward-0", "score") as span:
                    renew(run.advice, config, task)
                    if run.advice.served:
                        span["reward_model"] = run.advice.served.version
                    for group in groups:
                        apply_judgement(group, judge(group, task, config, run.advice))
                batch += keep(run, groups)
                done = by_task(batch, task.shares)
                missing = [n - len(own) for n, own in zip(task.shares, done, strict=True)]
            with log.timed("learner", "train", version=version):
                metrics = learner_step(learner, sorted(batch, key=lambda g: g.group_id), config)
            close_step(run, batch, metrics)
            if learner.version % config.checkpoint_every == 0:
                checkpoint(learner, run.folder, log)
    finally:
        wall = log.close()
        learner.cursors = list(learner.begun)  # as after the last whole step
        checkpoint(learner, run.folder, log)

    busy = {"rollout": log.seconds["generate"] / wall, "learner": log.seconds["train"] / wall}
    end_run(run, {"staleness_bound": 0, "utilization": busy})
    exit_code(run)


if __name__ == "__main__":
    run_main(train, __doc__)
