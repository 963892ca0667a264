"""One episode, or one call, alone, within the limits that a run has for many."""

import reward
from runtime.config import Config


def guarded(who: str, seconds: float | None, function, *args) -> tuple:
    """What `reward.ask` finds out about function(*args)."""
    config = Config(reward_seconds=seconds or 0.0)  # 0: no limit
    return reward.ask(who, lambda request: function(*request), [args], config)[0]


def verify(task, problem, answers, seconds=1.0, memory=1024.0) -> reward.Verdict:
    """The verdict on one episode."""
    config = Config(reward_seconds=seconds, reward_memory=memory)
    return reward.verify(task, problem, [(tuple(answers), ())], config)[0]
