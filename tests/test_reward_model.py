"""A reward model: it learns from pairs, judges in the reward workers, and has versions."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from model_folders import write_folder
from test_methods import FLAGS

import train_async
import train_sync
from methods import reward_model as room
from methods.reward_model import PairConfig, pairs_of, scores, serve_newest, verdicts_by
from model import pack_tokens
from reward import Step, make_task, task_of
from runtime.config import Config, UserError, check
from runtime.folder import read_lines
from runtime.ledger import audit
from runtime.messages import Group, Trajectory

TASK = FLAGS["task"]


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """A folder with one reward model, which has learned enough to be better than chance."""
    folder = tmp_path_factory.mktemp("judges")
    room.train(PairConfig(task=TASK, out=str(folder), steps=120))
    return folder


def serve(folder, served=None, **flags):
    config = Config(**FLAGS | flags, reward_model=str(folder))
    return serve_newest(config, task_of(config), served)


def test_pairs_are_in_order_and_of_one_problem():
    task = make_task(TASK)
    pairs = pairs_of(task, "train", 0)
    for _ in range(50):
        better, worse = next(pairs)
        texts = [task.tokenizer.decode_bytes(x).decode() for x in (better, worse)]
        prompt = texts[0][: texts[0].index("reverse") + len("reverse")]
        assert texts[1].startswith(prompt)
        problem = {"answer": prompt.split()[0][::-1]}
        rewards = [task.step(problem, [text[len(prompt) : -1]]).reward for text in texts]
        assert rewards[0] > rewards[1], texts
    alike = dataclasses.replace(task, step=lambda problem, texts: Step("", 0.5, True))
    with pytest.raises(UserError, match="pairs had equal rewards"):
        next(pairs_of(alike, "train", 0))


@torch.no_grad()
def test_a_score_is_that_of_the_last_token_and_better_than_chance(judges):
    """Against one sequence at a time; on pairs that it has not seen."""
    served, sequences = serve(judges), [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    alone = [served.model(pack_tokens([x]))[-1] @ served.head for x in sequences]
    together = scores(served, sequences)
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-5)
    pairs = pairs_of(make_task(TASK), "eval", 1)
    right = (room.margins(served, [next(pairs) for _ in range(256)]) > 0).float().mean()
    assert right > 0.65, right


@torch.no_grad()
def test_it_gives_rewards_in_place_of_the_task(judges):
    task, served = make_task(TASK), serve(judges)
    pair = next(pairs_of(task, "eval", 2))
    prompt = len(task.tokenizer.encode_prompt(task.reset(0, "eval")["prompt"]))
    group = Group(0, 0, {})
    for i, tokens in enumerate((*pair, pair[0], pair[0][:-1])):
        spans = [(prompt, len(tokens))]
        group.trajectories.append(Trajectory(0, i, 0, spans, tokens=np.array(tokens, np.int32)))
    group.trajectories[2].finish = "env_error"
    group.trajectories[3].finish = "length"  # it has no end, which every pair has
    verdicts = verdicts_by(served, group)
    expected = [*torch.sigmoid(scores(served, [*pair])).tolist(), 0.0]
    expected.append(expected[0])
    assert [reward for reward, *_ in verdicts] == pytest.approx(expected)
    assert [turns for _, turns, _ in verdicts] == [(reward,) for reward, *_ in verdicts]


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_a_newer_file_is_served_in_the_middle(judges, tmp_path, monkeypatch, reward_workers):
    folder, run, real, published = tmp_path / "judges", tmp_path / "run", train_async.learn, []
    shutil.copytree(judges, folder)

    def learn(run, batch):
        if run.learner.version == 3:  # from now on another one judges
            stored = torch.load(folder / "1.pt", weights_only=True)
            torch.save(stored | {"head": -stored["head"]}, folder / "part")
            (folder / "part").rename(folder / "2.pt")
            published.append(run.learner.version)
        return real(run, batch)

    monkeypatch.setattr(train_async, "learn", learn)
    flags = FLAGS | {"steps": 12, "max_staleness": 2, "reward_workers": reward_workers}
    train_async.train(Config(**flags, reward_model=str(folder), out=str(run)))
    monkeypatch.undo()
    events = [e for e in read_lines(run / "events.jsonl") if e["kind"] == "score"]
    assert published == [3] and {event["reward_model"] for event in events} == {1, 2}
    assert audit(run).totals()["in_flight"] == 0
    with pytest.raises(UserError, match="a task that answers and judges here"):
        train_async.train(Config(replay=str(run)))
    rows = read_lines(run / "metrics.jsonl")
    assert all(0 < row["reward"] < 1 for row in rows if "reward" in row)


def test_the_synchronous_trainer_asks_it_and_the_exam_does_not(judges, tmp_path):
    """Held-out problems are verified by the task: their rewards are shares of two digits."""
    run = tmp_path / "run"
    train_sync.train(Config(**FLAGS | {"steps": 2}, reward_model=str(judges), out=str(run)))
    rows = read_lines(run / "metrics.jsonl")
    assert 0.01 < rows[1]["reward"] < 0.99
    held = rows[0]["eval"]["reward"] * 256 * 6  # lengths 2 and 3
    assert held == pytest.approx(round(held), abs=1e-6)


def test_a_newer_file_that_cannot_be_read_changes_nothing(judges, tmp_path, capsys):
    shutil.copy(judges / "1.pt", tmp_path / "1.pt")
    served = serve(tmp_path)
    (tmp_path / "2.pt").write_bytes(b"half")
    with pytest.raises(UserError, match="must be a folder of methods/reward_model.py"):
        serve(tmp_path)
    for _ in range(3):
        served = serve(tmp_path, served)
    assert served.version == 1 and capsys.readouterr().err.count("goes on judging") == 1
    shutil.copy(judges / "1.pt", tmp_path / "3.pt")
    shutil.copy(judges / "1.pt", tmp_path / "04.pt")  # no name of ours
    assert serve(tmp_path, served).version == 3
    for path in tmp_path.glob("[0-4]*.pt"):
        path.unlink()
    assert serve(tmp_path, served).version == 1


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"reward_model": "nowhere"}, "no file 1.pt"),
        ({"task": "sort:2"}, "it is for 'reverse:2'"),
        ({"task": "guess"}, "several turns"),
        ({"model": "QWEN"}, "its vocabulary is the project's own"),
    ],
)
def test_a_reward_model_that_does_not_fit_costs_one_line(judges, tmp_path, flags, words):
    if flags.get("model"):
        flags = {"model": str(write_folder(tmp_path / "qwen"))}
    flags = FLAGS | {"reward_model": str(judges), "out": str(tmp_path / "run")} | flags
    with pytest.raises(UserError) as error:
        train_sync.train(check(Config(**flags)))
    line = str(error.value)
    assert words in line and flags["reward_model"] in line and "\n" not in line, line
    with pytest.raises(UserError, match="must be a task of one turn"):
        room.train(PairConfig(task="guess", out=str(tmp_path)))
