"""methods/reward_model.py: a learned reward, by a small model that compares answers.

    python -m methods.reward_model --task reverse --out judges  # learns from pairs: judges/1.pt
    python train_async.py --task reverse --reward-model judges  # reward workers ask it
    python -m methods.reward_model --task reverse --out judges  # later: judges/2.pt

A GPT reads prompt and answer; the hidden state of the last token, times one vector, is the score.
Of two answers to a prompt the better one should score higher: the loss is -log sigmoid(s+ - s-)
(Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155). Pairs are the task's best answer,
spoiled twice; the task says which is better, in place of a human.
A run takes sigmoid(score) for the reward of an answer. It serves the newest file of the folder,
also one that appears during the run (write it elsewhere, then move it there); the version that has
judged a group is in the log. Held-out problems are still verified by the task, so a run shows what
its reward model is worth.
Left out: tasks of several turns, pairs that people have judged.

Axes: N sequences · d model width
"""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import GPT, PRESETS, ModelConfig, pack_tokens
from reward import Task, alphabet_of, complete, make_task, specs_of
from runtime.checkpoint import load_tensors
from runtime.config import Config, UserError, blame, flag, one_of, require
from runtime.folder import write_file
from runtime.messages import Group
from runtime.models import model_of
from runtime.terminal import run_main
from runtime.tokenizer import own_tokenizer, same_words
from tasks import limits

PAIRS = 64  # of a step


@dataclass(frozen=True)
class PairConfig:
    """What `python -m methods.reward_model` needs to know."""

    task: str = flag("reverse", "task whose answers are compared: one turn")
    out: str = flag("judges", "folder of reward models; the next number is written")
    steps: int = flag(400, "optimizer steps", 1)
    lengths: str = one_of("lengths of spoiled answers", "any", "near")
    lr: float = flag(2e-3, "learning rate of AdamW", 0, 1.0)
    seed: int = flag(0, "seed of weights and pairs", 0, 2**31 - 1)


class RewardModel(NamedTuple):
    """A model, what its hidden states are multiplied with [d], which of the folder it is, and which
    newer one could not be read."""

    model: GPT
    head: Tensor
    version: int
    refused: int = 0


def scores(served: RewardModel, sequences: list) -> Tensor:
    """Scores [N] of sequences of token ids; more is better."""
    packed = pack_tokens(sequences)
    last = torch.tensor([len(tokens) for tokens in sequences]).cumsum(0) - 1
    return served.model(packed)[last] @ served.head


# ---- learning from pairs ----


def spoiled(answer: list, words: np.ndarray, random: np.random.Generator, lengths: str) -> list:
    """An answer in which some tokens are others; sometimes one too many or too few, or, with "any",
    cut anywhere: a policy exploits what no pair shows ("near": empty answers win)."""
    tokens = np.array(answer)
    if lengths == "any" and random.random() < 0.5:  # cut anywhere, with up to three more
        tokens = tokens[: random.integers(len(tokens) + 1)]
        tokens = np.append(tokens, random.choice(words, random.integers(4)))[: len(answer)]
    wrong = random.random(len(tokens)) < random.uniform(0.0, 0.8)
    tokens[wrong] = random.choice(words, wrong.sum())
    # one in three lacks its last token, one in three has one more
    tokens = tokens[: random.choice([len(tokens), len(tokens), len(tokens) - 1])].tolist()
    return tokens + random.choice(words, random.choice([0, 0, 1])).tolist()


def pairs_of(task: Task, split: str, seed: int, lengths: str = "any") -> Iterator[tuple]:
    """(better, worse), token ids of prompt and answer, on one problem after the other."""
    random, tokenizer, alike = np.random.default_rng(seed), task.tokenizer, 0
    words = np.array([token for token in alphabet_of(task).tolist() if token not in task.stop])
    for index in count():
        problem = task.reset(index if split == "train" else index % task.eval_size, split)
        prompt = tokenizer.encode_prompt(problem["prompt"])
        best = tokenizer.encode(task.solve(problem)[0])[: task.turn_tokens]
        answers = []
        for _ in range(2):
            tokens = spoiled(best, words, random, lengths)
            text = tokenizer.decode_bytes(tokens).decode(errors="replace")
            (reward,) = complete(task, problem, ((text,), ()))
            answers.append((reward, [*prompt, *tokens, tokenizer.end]))
        (less, worse), (more, better) = sorted(answers)
        alike = alike + 1 if less == more else 0
        if less < more:
            yield better, worse
        same = f"must be one that tells answers apart: {alike} pairs had equal rewards"
        require(alike < 1000, f"--task {task.name}: {same}")


def learn(task: Task, config: PairConfig, version: int) -> RewardModel:
    """A reward model from random weights, by AdamW on pairs."""
    shape = PRESETS["tiny"] | {"context": task.context + 2, "vocab_size": task.tokenizer.size}
    model = GPT(ModelConfig(**shape), config.seed)
    weights, head = nn.Parameter(model.flat), nn.Parameter(torch.zeros(model.config.width))
    weights.grad = model.flat_grad
    served = RewardModel(model, head, version)
    torch.set_num_threads(1)  # small matrices
    optimizer = torch.optim.AdamW([weights, head], config.lr, weight_decay=0.0)
    pairs = pairs_of(task, "train", config.seed, config.lengths)
    for step in tqdm(range(config.steps), unit="step"):
        optimizer.param_groups[0]["lr"] = config.lr * (1 - step / config.steps)
        batch = [next(pairs) for _ in range(PAIRS)]
        loss = -F.logsigmoid(margins(served, batch)).mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    return served._replace(head=head.detach())


def margins(served: RewardModel, batch: list) -> Tensor:
    """How much higher the better answer of each pair scores."""
    better, worse = zip(*batch, strict=True)
    better, worse = scores(served, [*better, *worse]).split(len(batch))
    return better - worse


def train(config: PairConfig) -> float:
    """Learn, and write the next file of the folder; returns the share of unseen pairs that are
    judged rightly."""
    task, folder = make_task(config.task, config.seed), Path(config.out)
    require(task.max_turns == 1, f"--task {config.task}: must be a task of one turn")
    with blame(f"--out {folder}: must be a folder that can be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    served = learn(task, config, newest_version(folder) + 1)
    unseen = pairs_of(task, "eval", config.seed, config.lengths)
    with torch.no_grad():
        right = (margins(served, [next(unseen) for _ in range(512)]) > 0).float().mean()
    facts = {"shape": vars(served.model.config), "weights": served.model.flat, "head": served.head}
    torch.save(facts | {"task": config.task}, memory := io.BytesIO())
    path = folder / f"{served.version}.pt"
    write_file(path, memory.getvalue())
    print(f"{path}: {right:.1%} of 512 held-out pairs are judged rightly")
    return float(right)


# ---- serving ----


def newest_version(folder: Path) -> int:
    """The largest number of the files 1.pt, 2.pt, ... of a folder; 0 where there are none."""
    found = [path.stem for path in folder.glob("[1-9]*.pt")]
    return max(map(int, filter(str.isdecimal, found)), default=0)


def serve_newest(config: Config, task: Task, served: RewardModel | None) -> RewardModel:
    """The newest reward model of the configured folder, read if it is another one than before. If
    it cannot be read, the one before stays.

    UserError for a first one that does not fit the task.
    """
    newest = newest_version(Path(config.reward_model))
    if served and newest in (0, served.version, served.refused):
        return served
    try:
        return read_reward_model(config, task, newest)
    except UserError as error:
        if not served:
            raise
        print(f"{error}; version {served.version} goes on judging", file=sys.stderr, flush=True)
        return served._replace(refused=newest)


def read_reward_model(config: Config, task: Task, version: int) -> RewardModel:
    """One version of the configured folder; UserError."""
    must = f"--reward-model {config.reward_model}: must be"
    single = task.max_turns == 1 and len(specs_of(config.task)) == 1
    require(single, f"{must} left out with --task {config.task}: several tasks, or several turns")
    needed = "a folder of methods/reward_model.py, for this task"
    with blame(f"{must} {needed}", (Exception, limits.OutOfTime)):
        require(version > 0, "it has no file 1.pt, 2.pt, ...")
        stored = load_tensors(Path(config.reward_model, f"{version}.pt"))
        require(stored["task"] == config.task, f"it is for {stored['task']!r:.80}")
        require(same_words(task.tokenizer, own_tokenizer()), "its vocabulary is the project's own")
        model = model_of(stored, replace(config, model="tiny"), task)
        require(stored["head"].shape == (model.config.width,), "its head has another width")
        whole = torch.cat([model.flat, stored["head"]])
        require(whole.isfinite().all(), "its weights must be finite")
    model.flat.requires_grad_(False)
    return RewardModel(model, stored["head"], version)


@torch.no_grad()
def verdicts_by(served: RewardModel, group: Group) -> list[tuple]:
    """(reward, rewards of turns, None) of the episodes of a group, by a reward model."""
    end = own_tokenizer().end  # every pair has one; the limit of tokens may have cut it
    texts = [
        () if t.failed else (*t.tokens, *[end] * (t.finish == "length")) for t in group.trajectories
    ]
    # equal answers once: rows of a matrix product may differ in the last bit
    several = [*filter(None, dict.fromkeys(texts))]
    found = torch.sigmoid(scores(served, several)).tolist() if several else ()
    rewards = {(): 0.0, **dict(zip(several, found, strict=True))}
    return [(rewards[text], (rewards[text],), None) for text in texts]


if __name__ == "__main__":
    run_main(train, __doc__, PairConfig)
