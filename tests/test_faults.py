"""A run that is broken on purpose ends as if nothing had happened, or says by name what did."""

import faults
import pytest
from faults import fail_at, losses_noticed, run_plan


def test_a_run_survives_what_befalls_it(tmp_path):
    plan = [
        fail_at("rollout", "send", "SIGKILL", after=8),
        fail_at("rollout", "send", "token", after=20),
        fail_at("rollout", "send", "torn", after=28),  # trained before version 8
        fail_at("reward", "send", "NaN reward", after=20),
        fail_at("learner", "train", "no tracker", after=2),
        fail_at("learner", "train", "NaN gradient", after=4),
        fail_at("learner", "checkpoint", "full disk", after=7),
        fail_at("reward", "receive", "exception", after=48),  # after the resume
    ]
    flags = {"steps": 14, "silence": 20.0, "rollout_workers": 1, "restarts": 6}
    result = run_plan(tmp_path / "run", plan, **flags)
    assert result["faults"] == plan  # every one has struck
    assert (result["lost"], result["duplicated"]) == (0, 0)
    stopped, finished = result["ends"]
    assert "File too large" in stopped and "step0000008.pt" in stopped and finished == "finished"
    (dead,) = result["noticed_after_s"]["dead"]
    assert dead < 100
    reasons = sorted(n["reason"].partition(": ")[0] for n in losses_noticed(tmp_path / "run"))
    assert [x for x in reasons if x.startswith("died")] == [
        "died (exit code -9)",
        "died (exit code 1",
    ]
    assert len([x for x in reasons if x.startswith("sent nonsense")]) == 3


def test_random_plans_come_to_every_kind_of_fault():
    choose, deck, seen = faults.random.Random(0), [], set()
    for _ in range(17):
        plan = faults.random_plan(choose, deck, 8)
        fatal = [f for f in plan if f["role"] == "learner" and f["kind"] in faults.FATAL]
        assert len(plan) == 8 and len(fatal) <= 2
        seen |= {(f["role"], f["event"], f["kind"]) for f in plan}
    everything = {(*place, kind) for place, kinds in faults.KINDS.items() for kind in kinds}
    assert seen == everything
    with pytest.raises(AssertionError, match="learner log torn: must be one of"):
        fail_at("learner", "log", "torn")
