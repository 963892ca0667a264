"""A reward model: it learns from pairs, judges in the reward workers, and has versions."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from qwen3 import write_folder
from test_teacher import FLAGS

import train_async
import train_sync
from methods import reward_model as room
from methods.reward_model import PairConfig, pairs_of, scores, serve_newest, verdicts_by
from model import GPT, ModelConfig, pack_tokens
from reward import Step, make_task, task_of
from runtime.config import Config, UserError, check
from runtime.folder import read_lines
from runtime.ledger import Ledger, audit, table
from runtime.messages import Group, Trajectory

ROOT = Path(__file__).parent.parent
TASK = FLAGS["task"]


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """A folder with one reward model, which has learned enough to be better than chance."""
    folder = tmp_path_factory.mktemp("judges")
    room.train(PairConfig(task=TASK, out=str(folder), steps=120))
    return folder


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


def test_a_score_is_that_of_the_last_token(judges):
    """Against one sequence at a time."""
    config = Config(**FLAGS, reward_model=str(judges))
    served = serve_newest(config, task_of(config), None)
    sequences = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    with torch.no_grad():
        found = scores(served, sequences)
        alone = [served.model(pack_tokens([x]))[-1] @ served.head for x in sequences]
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_it_judges_unseen_pairs_better_than_chance(judges):
    config = Config(**FLAGS, reward_model=str(judges))
    served, pairs = (
        serve_newest(config, task_of(config), None),
        pairs_of(task_of(config), "eval", 1),
    )
    with torch.no_grad():
        right = (room.margins(served, [next(pairs) for _ in range(256)]) > 0).float().mean()
    assert right > 0.65, right


def test_it_gives_rewards_in_place_of_the_task(judges):
    config = Config(**FLAGS, reward_model=str(judges))
    task = task_of(config)
    served, (better, worse) = serve_newest(config, task, None), next(pairs_of(task, "eval", 2))
    prompt = len(task.tokenizer.encode_prompt(task.reset(0, "eval")["prompt"]))
    group = Group(0, 0, {})
    for i, tokens in enumerate((better, worse, better)):
        t = Trajectory(0, i, 0, turns=[(prompt, len(tokens))])
        t.tokens = np.array(tokens, np.int32)
        group.trajectories.append(t)
    group.trajectories[2].finish = "env_error"
    verdicts = verdicts_by(served, group)
    with torch.no_grad():
        expected = torch.sigmoid(scores(served, [better, worse])).tolist()
    assert [value for value, *_ in verdicts] == pytest.approx([*expected, 0.0])
    assert [turns for _, turns, _ in verdicts] == [(value,) for value, *_ in verdicts]


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_a_newer_file_is_served_in_the_middle_and_a_run_replays(judges, tmp_path, reward_workers):
    folder, run = tmp_path / "judges", tmp_path / "run"
    shutil.copytree(judges, folder)
    flags = FLAGS | {"steps": 12, "max_staleness": 2, "reward_workers": reward_workers}
    config = check(Config(**flags, reward_model=str(folder), out=str(run)))
    real, published = train_async.learn, []

    def learn(run, batch):
        if run.learner.version == 3:  # from now on another one judges
            stored = torch.load(folder / "1.pt", weights_only=True)
            torch.save(stored | {"head": -stored["head"]}, folder / "part")
            (folder / "part").rename(folder / "2.pt")
            published.append(run.learner.version)
        return real(run, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_async, "learn", learn)
        train_async.train(config)
    events = [e for e in read_lines(run / "events.jsonl") if e["kind"] == "score"]
    versions = [event["reward_model"] for event in events]
    assert published == [3] and set(versions) == {1, 2}, versions
    train_async.train(Config(replay=str(run)))
    ledger = audit(run)
    assert ledger.totals()["oldest_verified"] == max(event["age"] for event in events) <= 2
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


def test_the_books_tell_how_old_the_oldest_was_when_it_was_judged():
    ledger = Ledger()
    for group, age in enumerate((0, 2, 1)):
        for kind in ("admit", "start", "finish", "score"):
            ledger.note({"kind": kind, "group": group, "age": age})
    assert ledger.totals()["oldest_verified"] == 2
    assert table(ledger.totals()).split()[-1] == "2"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--reward-model", "nowhere", "--task", TASK], ["nowhere", "no file 1.pt"]),
        (["--reward-model", "FOLDER", "--task", "sort:2"], ["it is for 'reverse:2'"]),
        (["--reward-model", "FOLDER", "--task", "guess"], ["several turns"]),
    ],
)
def test_a_reward_model_that_does_not_fit_costs_one_line(judges, tmp_path, flags, words):
    spoken = [word.replace("FOLDER", str(judges)) for word in flags]
    command = [sys.executable, "train_sync.py", "--out", str(tmp_path / "run"), *spoken]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_what_is_no_reward_model_is_refused(judges, tmp_path):
    shutil.copy(judges / "1.pt", tmp_path / "1.pt")
    (tmp_path / "2.pt").write_bytes(b"no model")
    config = Config(**FLAGS, reward_model=str(tmp_path))
    with pytest.raises(UserError, match="must be a folder of methods/reward_model.py"):
        serve_newest(config, task_of(config), None)
    with pytest.raises(UserError, match="must be a task of one turn"):
        room.train(PairConfig(task="guess", out=str(tmp_path)))
    assert room.newest_version(tmp_path) == 2 and room.newest_version(tmp_path / "none") == 0
    shutil.copy(judges / "1.pt", tmp_path / "03.pt")
    (tmp_path / "4.pt").mkdir()
    assert room.newest_version(tmp_path) == 2


def test_a_newer_file_that_cannot_be_read_changes_nothing(judges, tmp_path, capsys):
    shutil.copy(judges / "1.pt", tmp_path / "1.pt")
    config = Config(**FLAGS, reward_model=str(tmp_path))
    served = serve_newest(config, task_of(config), None)
    (tmp_path / "2.pt").write_bytes(b"half")
    for _ in range(3):
        served = serve_newest(config, task_of(config), served)
    assert served.version == 1 and capsys.readouterr().err.count("goes on judging") == 1
    shutil.copy(judges / "1.pt", tmp_path / "3.pt")
    assert serve_newest(config, task_of(config), served).version == 3
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    assert serve_newest(config, task_of(config), served).version == 1


@pytest.mark.parametrize(
    "change, words",
    [
        ({"weights": torch.ones(1)}, "for its shape"),
        ({"head": torch.full((64,), float("nan"))}, "must be finite"),
        ({"head": torch.ones(3)}, "another width"),
        ({"shape": {"context": 4}}, "positions for task"),
        ({"shape": {"vocab_size": 100}}, "for its shape"),
        ({"shape": {"vocab_size": 10**9}}, "must be a folder of methods/reward_model.py"),
    ],
)
def test_a_file_from_somebody_else_is_looked_at(judges, tmp_path, change, words):
    stored = torch.load(judges / "1.pt", weights_only=True)
    (name, value), *_ = change.items()
    if name == "shape":
        value = stored["shape"] | value
        if "context" in change["shape"]:  # with the positions that it says
            small = GPT(ModelConfig(**value), 0)
            stored["weights"] = small.flat.detach()
    torch.save(stored | {name: value}, tmp_path / "1.pt")
    config = Config(**FLAGS, reward_model=str(tmp_path))
    with pytest.raises(UserError, match=words):
        serve_newest(config, task_of(config), None)


def test_a_reward_model_has_the_projects_own_vocabulary(judges, tmp_path):
    folder = write_folder(tmp_path / "qwen")
    config = Config(**FLAGS | {"model": str(folder)}, reward_model=str(judges))
    with pytest.raises(UserError, match="its vocabulary is the project's own"):
        serve_newest(config, task_of(config), None)


def test_answers_that_are_all_alike_teach_nothing():
    alike = dataclasses.replace(make_task(TASK), step=lambda problem, texts: Step("", 0.5, True))
    with pytest.raises(UserError, match="pairs had equal rewards"):
        next(pairs_of(alike, "train", 0))
