"""train_sync.py: reinforcement learning, one thing at a time: generate, verify, learn, repeat.

    python train_sync.py                     # guess a number, from random weights
    python train_sync.py --task reverse:6    # --help-all lists all flags

This is the honest baseline and the place to start reading: `train` is the whole algorithm in one
flat loop. `learner_step` is the one that train_async.py uses, too. Here all data are fresh and
every ratio is 1, so most objectives make the same step: compare learning rates here.
Left out: processes, queues, staleness (here it is always 0).
"""

from learner import learner_step, new_groups
from rollout import COUNTED, generate, make_generator
from runtime.books import close_step, keep
from runtime.config import Config
from runtime.messages import apply_judgement
from runtime.run import (
    begin_run,
    end_run,
    running,
    save,
)
from runtime.terminal import run_main


def train(config: Config) -> None:
    """The synchronous algorithm: generate, verify, learn, and nothing at the same time."""
    with running(config, "sync") as run:
        config = run.config
        learner = run.learner
        log = run.log
        begin_run(run)
        generator = make_generator(config, run.task, learner.model)
        while learner.version < config.steps and not run.stop.asked:
            version = learner.version
            batch = []
            generator.set_weights(version, learner.model.flat)  # in place; adapters are merged
            while len(batch) < config.groups_per_step:  # again only where groups are discarded
                prompts = new_groups(learner, run.task, config.groups_per_step - len(batch))
                with log.timed("rollout-0", "generate", version=version) as span:
                    before = generator.counts.copy()
                    groups = generate(generator, prompts, run.exam)
                    span |= {name: generator.counts[name] - before[name] for name in COUNTED}
                with log.timed("reward-0", "score"):
                    for group in groups:
                        apply_judgement(group, run.judge(group))
                batch += keep(run, groups)
            with log.timed("learner", "train", version=version):
                metrics = learner_step(learner, batch, config)
            close_step(run, batch, metrics)
            if learner.version % config.checkpoint_every == 0:
                save(run)
        log.close()
        save(run)
        end_run(run)


if __name__ == "__main__":
    run_main(train, __doc__)
