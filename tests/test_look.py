"""A run as one page: its facts are those of the run, and nothing escapes from it."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from test_replay import rewrite, scores_of, wander

import bench
import losses
import train_async
from lab import look
from model import pack_tokens
from runtime.config import Config
from runtime.folder import read_lines
from runtime.replay import played_again, recorded

LOW, HIGH = 1 - losses.PUBLISHED.double_low, 1 + losses.PUBLISHED.double_high
EVIL = '</script><script>window.evil=1</script><img src=x onerror="window.evil=2"><!--'


def page_of(folder) -> dict:
    """The facts in a page, as its script reads them."""
    text = (folder / "look.html").read_text()
    (facts,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', text, re.S)
    return json.loads(facts)


def look_at(folder, *words: str) -> dict:
    look.look([str(folder), *words])
    return page_of(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with much staleness, and all its groups in a page."""
    folder = tmp_path_factory.mktemp("look") / "run"
    flags = {"objective": "double_sided", "lr": 3e-3, "swap": "keep"}
    wander(folder, 3, 2, **flags)
    return folder, look_at(folder, "--groups", "1000")


def batches_of(folder):
    """Every step of a run again, as the replay plays it: it compares each with the log."""
    config, *script = recorded(dataclasses.replace(Config(), replay=str(folder)))
    for learner, event, batch in played_again(config, *script):
        yield config, learner, event, batch


def test_tokens_and_versions_are_those_of_the_run(run):
    folder, page = run
    shown = {group["group"]: group for group in page["groups"]}
    events = {event["group"]: event for event in scores_of(folder)}
    crossed = 0
    for _, _, event, batch in batches_of(folder):
        for group in batch:
            own = shown.pop(group.group_id)
            assert own["version"] == event["version"]
            score = events[group.group_id]  # a worker has written that, not the replay
            assert [one["swaps"] for one in own["episodes"]] == score["swaps"]
            assert [len(one["tokens"]) for one in own["episodes"]] == score["lengths"]
            for one, t in zip(own["episodes"], group.trajectories, strict=True):
                swaps = one["swaps"]
                assert one["tokens"] == t.tokens.tolist() and one["finish"] == t.finish
                assert one["versions"] == t.versions[t.loss_mask].tolist()
                assert one["turns"] == [list(turn) for turn in t.turns]
                assert one["reward"] == pytest.approx(t.reward, rel=1e-3)
                assert one["behaviour"] == pytest.approx(
                    t.logprobs[t.loss_mask], rel=1e-3, abs=1e-3
                )
                positions = t.loss_mask.nonzero()[0]
                for position, version in zip(positions, one["versions"], strict=True):
                    pairs = zip(swaps[::2], swaps[1::2], strict=True)
                    fed = [version for first, version in pairs if first < position]
                    assert version == fed[-1]  # where the page draws the swap
                crossed += len(swaps) > 2
    assert not shown and crossed > 20


def test_what_the_learner_made_of_a_token_is_computed_again_another_way(run):
    folder, page = run
    shown = {group["group"]: group["episodes"] for group in page["groups"]}
    cut = stale = 0
    for _, learner, event, batch in batches_of(folder):
        assert learner.version == event["version"]  # the step has not been taken
        for group in batch:
            rewards = torch.tensor([t.reward for t in group.trajectories])
            spread = rewards.std() + 1e-6
            for t, one in zip(group.trajectories, shown[group.group_id], strict=True):
                with torch.no_grad():
                    hidden = learner.model(pack_tokens([t.tokens]))
                    logits = learner.model.logits(hidden[:-1], learner.alphabet)
                policy = torch.log_softmax(logits, -1)[t.loss_mask[1:]]  # [M, V]
                tokens = torch.from_numpy(t.tokens[t.loss_mask]).long()
                which = (tokens[:, None] == learner.alphabet).int().argmax(-1)
                logprobs = policy.gather(-1, which[:, None])[:, 0]
                ratio = (logprobs - torch.from_numpy(t.logprobs[t.loss_mask])).exp()
                mine = [b - a for a, b in zip(one["behaviour"], one["logprobs"], strict=True)]
                assert torch.tensor(mine).exp().tolist() == pytest.approx(ratio.tolist(), rel=5e-3)
                entropy = -(policy.exp() * policy).sum(-1)
                assert one["entropy"] == pytest.approx(entropy.tolist(), rel=1e-2, abs=1e-3)
                advantage = float((t.reward - rewards.mean()) / spread)
                same = [advantage] * len(ratio)
                assert one["advantages"] == pytest.approx(same, rel=1e-3, abs=1e-5)
                outside = (ratio <= LOW) | (ratio >= HIGH)
                sure = ((ratio - LOW).abs() > 1e-3) & ((ratio - HIGH).abs() > 1e-2)
                found = torch.zeros_like(outside)
                found[one["clipped"]] = True
                assert (found == outside)[sure].all() and one["capped"] == []
                if learner.version == 0:  # the weights that have sampled
                    assert one["logprobs"] == pytest.approx(one["behaviour"], rel=1e-3, abs=1e-5)
                cut, stale = cut + int(outside.sum()), stale + int((ratio != 1).sum())
    assert cut > 20 and stale > 100


def test_a_life_is_what_the_log_says(run):
    folder, page = run
    events = read_lines(folder / "events.jsonl")
    issued = [event for event in events if event["kind"] == "requeue"]
    assert issued  # a worker died
    for group in page["groups"]:
        life, own = group["life"], [e for e in events if e.get("group") == group["group"]]
        last = {event["kind"]: event for event in own}
        for kind in ("start", "finish", "score"):
            assert life[kind] == last[kind]["t"]
        begin = last.get("requeue", last["admit"])
        assert (life["admit"], life["worker"]) == (begin["t"], begin["worker"])
        assert life["again"] == ("requeue" in last)
        step = next(e for e in events if group["group"] in e.get("groups", ()))
        assert (life["train"], group["version"]) == (step["t"], step["version"])
    assert [step["step"] for step in page["steps"]] == [*range(1, 9)]
    for step in page["steps"]:
        assert len(step["waits"]) == 6


def test_several_learners_and_real_workers(tmp_path):
    flags = {"groups_per_step": 4, "group_size": 4, "slots": 16, "steps": 4, "eval_every": 2}
    config = dataclasses.replace(Config(), out=str(tmp_path / "run"), learners=2, **flags)
    train_async.train(config)
    page = look_at(tmp_path / "run")
    assert len(page["groups"]) == 16 and page["trouble"] == ""
    reward_curve, exam = page["curves"]
    rows = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    assert reward_curve["x"] == [1, 2, 3, 4] and exam["x"] == [0, 2, 4]
    assert reward_curve["y"] == pytest.approx([row["reward"] for row in rows], rel=1e-3)
    assert {"learner", "rollout-0", "reward-0"} <= page["spans"].keys()
    trained = [span for span in page["spans"]["learner"] if span[2] == "train"]
    assert [span[3] for span in trained] == [0, 1, 2, 3]
    assert all(group["life"]["admit"] <= group["life"]["trained"] for group in page["groups"])


def test_failed_samples_are_said_to_have_failed(tmp_path):
    folder = tmp_path / "run"
    wander(folder, 7, 2, out_of_time=0.2, max_failures=1.0)
    page = look_at(folder, "--groups", "1000")
    failed = 0
    for group in page["groups"]:
        episodes = group["episodes"]
        assert sum(one["times"] for one in episodes) == len(episodes)  # the group is repaired
        for one in episodes:
            assert (one["finish"] == "verifier_timeout") == (one["times"] == 0)
            assert ("tokens" in one) == (one["times"] > 0)
            failed += one["times"] == 0
    assert failed > 5


def test_a_run_that_comes_out_otherwise_is_shown_up_to_there(run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    steps = [
        i for i, e in enumerate(read_lines(folder / "events.jsonl"), 1) if e["kind"] == "train"
    ]
    rewrite(folder, steps[4], lambda event: event.update(loss=0.125))
    with pytest.raises(SystemExit, match="stopped: .* is the train of step 4: loss is"):
        bench.main(["look", str(folder)])
    page = page_of(folder)
    assert {group["version"] for group in page["groups"]} == {0, 1, 2, 3, 4}
    assert len(page["steps"]) == 8 and "step 4" in page["trouble"]


def test_a_mistake_costs_one_line(run, tmp_path, capsys):
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            bench.main(["look", *words])
        said = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2 and len(said) == 1, said
        return said[0]

    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    assert "look: must be given a run folder" in refused()
    assert "look nowhere: must be a run folder" in refused("nowhere")
    assert "--groups -1" in refused(str(folder), "--groups", "-1")
    assert "--pages 2: must be a flag" in refused(str(folder), "--pages", "2")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "must be a run folder" in refused(str(empty))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"mode": "async"', '"mode": "sync"'))
    assert refused(str(folder)).endswith("must be a run of train_async.py")
    (folder / "config.json").write_text(text)
    events = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(events[: len(events) // 2])
    assert "must be finished and have a whole log" in refused(str(folder))
    (folder / "events.jsonl").unlink()
    assert "must be finished and have a whole log" in refused(str(folder))
    (folder / "events.jsonl").write_bytes(events)
    (folder / "summary.json").unlink()
    assert "must be finished and have a whole log" in refused(str(folder))


def test_nothing_leaves_the_facts_and_nothing_is_loaded():
    text = look.to_json({"texts": {1: EVIL, 2: "\u2028"}})
    assert "<" not in text and json.loads(text)["texts"]["1"] == EVIL
    page = look.PAGE.read_text()
    assert page.count("{{run}}") == 1
    assert not re.search(r"https?:|//\w|\bsrc *=|href|@import|url\(", page)
    assert "default-src 'none'" in page  # the browser forbids it, too
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", page)
