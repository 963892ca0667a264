"""docs/walk.py: the run that docs/tour.md follows, and what one episode looks like in each room.

    python docs/walk.py

The run is `train_async.train` itself, for six steps, with one thing replaced: the workers. They are
one generator and one verifier in this process, which move by a count and not by a clock, so every
walk is the same. While "the learner computes a step" the generator makes four tokens a slot.
The last two stations have a small run of their own: agents, and a tool that breaks off.
Left out: real processes (runtime/processes.py); the page and its experiments (tour.py).
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import sys
import tempfile
from itertools import count, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dsa
import losses
import train_async
from buffer import pack, repaired, staleness, unfit
from learner import learner_step, make_learner, micro_batch_loss, naive_step, new_groups, samples_of
from logprobs import token_logprobs
from model import naive_forward, pack_tokens
from pretrain import episodes
from reward import split_answers, task_of, verify_group
from rollout import generate, make_generator, naive_generate
from runtime import run as run_room
from runtime.advice import judge
from runtime.arena import Arena
from runtime.config import Config, TrainingStopped
from runtime.folder import read_lines
from runtime.ledger import audit, table
from runtime.messages import (
    ARRAYS,
    Answer,
    apply_verdicts,
    lay_out,
    pack_messages,
    place_group,
    read_group,
    unpack_messages,
)
from runtime.models import make_model
from runtime.noise import uniforms
from runtime.tokenizer import own_tokenizer
from tasks.environment import make_environment

FLAGS = dict(groups_per_step=4, group_size=4, slots=24, steps=6, max_staleness=2, seed=0)
FLAGS |= dict(eval_every=1000, reference_every=2, lr=0.003, entropy=0.0, kl_threshold=0.15)
FLAGS |= dict(token_budget=160)  # two micro-batches a step
GROUP, SAMPLE = 18, 2  # whom the page follows
MEANWHILE = 4  # tokens that a slot generates while the learner computes one step
PATIENCE = 200  # tokens after which a batch should be there

AGENTS = dict(task="hops:2", credit="turn", seed=1)
AGENTS |= dict(groups_per_step=4, group_size=5, slots=20)
LESSONS = 40  # steps of imitation, of 32 good episodes each
BREAKS = 5  # of so many calls of the tool one breaks off

# ------------------------------------------------------------------------------------- the run


def workers_by_count(run: run_room.AsyncRun, seen: SimpleNamespace) -> SimpleNamespace:
    """What the trainer needs of a Pool, without a process; notes what the stations look at."""
    rollout = SimpleNamespace(name="rollout-0", role="rollout", behind=0.0)
    reward = SimpleNamespace(name="reward-0", role="reward", behind=0.0)
    generator = make_generator(run.config, run.task, make_model(run.config, run.task))
    generator.version = -1  # the first weights come from the mailbox, too
    work, news = {}, []
    seen.run, seen.weights, seen.waited = run, [run.learner.model.flat.clone()], 0

    def issue(role: str, groups: list) -> list[str]:
        version, order = run.learner.version, list(run.buffer.outstanding)
        for group in groups:
            generator.submit(group)
            work[group.group_id] = rollout.name
            place = order.index(group.group_id) + 1
            seen.admitted[group.group_id] = version, place, run.buffer.may_admit(version)
        return [rollout.name] * len(groups)

    def boundary() -> None:
        """One token for every slot; a finished group travels to its verifier."""
        if run.mailbox.version > generator.newest:
            seen.stamps[run.mailbox.version] = run.mailbox.stamps.tolist()
            generator.set_weights(*run.mailbox.read())
        generator.step()
        for group in generator.take_finished():
            events, generator.events = generator.events, []
            placed = seen.placed[group.group_id] = place_group(group, seen.arena)
            answer = Answer(group.group_id, placed, events=events)
            _, (message,) = unpack_messages(pack_messages((dict(generator.counts), [answer])))
            message = message._replace(group=read_group(message.group, seen.arena))
            judgement = judge(message.group, run.task, run.config, run.advice)
            verified = Answer(group.group_id, message.group, judgement)
            news.extend([(rollout, message), (reward, verified)])

    def receive(seconds: float) -> list[tuple]:
        seen.waited += 1
        assert seen.waited < PATIENCE, "the learner waits for ever: no batch may be trained"
        if seconds:  # the learner has nothing to do: time goes by
            boundary()
        arrived = list(news)
        news.clear()
        for _, message in arrived:
            work.pop(message.group_id, None)
        return arrived

    def learn(learner, batch, config) -> dict:
        """The step of the learner, and what the others do meanwhile."""
        for _ in range(MEANWHILE):
            boundary()
        metrics = learner_step(learner, batch, config)
        seen.waited = 0
        seen.weights.append(learner.model.flat.clone())
        seen.steps.append((batch, metrics, run.buffer.starts()))
        return metrics

    seen.learn = learn
    pool = SimpleNamespace(issue=issue, receive=receive, out=work.copy, workers={})
    return SimpleNamespace(**vars(pool), of=lambda role: [], close=lambda: None)


def run_by_count(folder: Path) -> SimpleNamespace:
    """Train six steps; returns what the stations look at."""
    config = dataclasses.replace(Config(), out=str(folder), **FLAGS)
    seen = SimpleNamespace(admitted={}, stamps={}, placed={}, steps=[])
    seen.arena = Arena()
    start = mock.patch.object(run_room, "start_workers", lambda run: workers_by_count(run, seen))
    learn = mock.patch.object(train_async, "learner_step", lambda *a: seen.learn(*a))
    with start, learn, contextlib.redirect_stdout(io.StringIO()):
        train_async.train(config)
    seen.config, seen.task = seen.run.config, seen.run.task
    seen.alphabet = seen.run.learner.alphabet
    return seen


def follow(seen: SimpleNamespace) -> SimpleNamespace:
    """Pick out whom the page follows: episode `t` of `group`, trained by step number `step`."""
    batches = [[group.group_id for group in batch] for batch, *_ in seen.steps]
    seen.step = next(i for i, ids in enumerate(batches) if GROUP in ids)
    seen.batch, seen.metrics, seen.left = seen.steps[seen.step]
    seen.group = seen.batch[batches[seen.step].index(GROUP)]
    seen.t = seen.group.trajectories[SAMPLE]
    return seen


def play_agents(config: Config) -> SimpleNamespace:
    """Play four groups of agents; returns the first one, and the learner that gets it. Their policy
    has imitated for a moment: with random weights hardly anybody makes a hop."""
    task, calls = task_of(config), count(1)
    model = make_model(config, task)
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    stream = islice(episodes(task, "train"), 100 * 19, None)  # 19 tokens each; not those played
    for _ in range(LESSONS):
        rows = torch.tensor(list(islice(stream, 32 * 19))).view(32, 19)
        logits = model.logits(model(pack_tokens(list(rows)))).view(32, 19, -1)
        optimizer.zero_grad()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()

    def step(problem, answers):
        if answers[-1] in problem["facts"] and next(calls) % BREAKS == 0:
            raise ConnectionError("the tool has hung up")
        return task.step(problem, answers)

    broken = dataclasses.replace(task, step=step)
    learner = make_learner(config, broken, model)
    groups = new_groups(learner, broken, config.groups_per_step)
    group = generate(make_generator(config, broken, model), groups)[0]
    apply_verdicts(group, verify_group(group, broken, config))
    return SimpleNamespace(config=config, task=task, learner=learner, group=group)


# -------------------------------------------------------------------------- helpers of the stations


def numbers(values, digits: int = 3) -> str:
    """Numbers in one line, with so few digits that every processor prints the same."""
    return " ".join(f"{float(value):7.{digits}f}" for value in values)


def say(tokens) -> str:
    """Token ids as text, each token in quotes."""
    return " ".join(repr(own_tokenizer().decode_bytes([int(token)]).decode()) for token in tokens)


def model_of(seen, version: int, **changes):
    """The policy of a version, or one with its weights and another kind of attention."""
    model = make_model(dataclasses.replace(seen.config, **changes), seen.task)
    model.flat.copy_(seen.weights[version])
    return model


@torch.no_grad()
def distribution(seen, at: int, version: int) -> torch.Tensor:
    """Log-probs [V] of all that could be said at a position, with one policy for the whole past."""
    model = model_of(seen, version)
    hidden = naive_forward(model, torch.from_numpy(seen.t.tokens[:at]))[-1:]
    return model.logits(hidden, seen.alphabet).log_softmax(-1)[0]


def logprobs_of(seen, model) -> torch.Tensor:
    """Log-probs of the episode's own tokens, as the learner computes them, with gradient."""
    return token_logprobs(model, [(seen.t, 0.0)], seen.run.learner, seen.config)[0]


def advantages_of(seen) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and advantages of the four episodes of the group."""
    rewards = torch.tensor([[sample.reward for sample in seen.group.trajectories]])
    advantages, _ = losses.group_advantages(rewards, seen.config.advantage)
    return rewards[0], advantages[0]


# ------------------------------------------------------------------------------------ the stations


def problem(seen) -> list[str]:
    prompt, alphabet = seen.group.problem["prompt"], seen.task.alphabet
    return [
        f"prompt        {prompt!r}, as tokens {own_tokenizer().encode(prompt)}",
        f"may say       {say(alphabet[:1])} to {say(alphabet[-1:])}, "
        f"tokens {alphabet[0]} to {alphabet[-1]}",
        f"secret        {seen.group.problem['secret']}, for environment and verifier only",
        f"binary search {seen.task.solve(seen.group.problem)}",
    ]


def admission(seen) -> list[str]:
    version, place, more = seen.admitted[GROUP]
    eta, size = seen.config.max_staleness, seen.config.groups_per_step
    return [
        f"learner at version {version}: group {GROUP} would be outstanding group {place}",
        f"{place} <= (eta + 1) B = ({eta} + 1) * {size} = {(eta + 1) * size}: admitted, "
        f"start {seen.group.start}",
        f"one more at version {version}, when all are in: {'yes' if more else 'no'}",
    ]


def noise(t) -> np.ndarray:
    """The uniform number of every position."""
    return uniforms(np.full(len(t.tokens), t.noise_key), np.arange(len(t.tokens)))


def slot(seen) -> list[str]:
    t, lines = seen.t, ["position  token    by           uniform  log-prob  version"]
    for i, (token, uniform) in enumerate(zip(t.tokens, noise(t), strict=True)):
        by = "prompt" if not i else "policy" if t.loss_mask[i] else "environment"
        drawn = f"{uniform:8.4f}{t.logprobs[i]:10.3f}{t.versions[i]:9}" if t.loss_mask[i] else ""
        lines.append(f"{i:8}  {say([token]):9}{by:12}{drawn}".rstrip())
    environment, version = make_environment(seen.config, seen.task), int(t.versions[1])
    prompt = own_tokenizer().encode(seen.group.problem["prompt"])
    tokens, found = naive_generate(model_of(seen, version), prompt, environment, t.noise_key)
    return [*lines, f"naive_generate, version {version}: {say(tokens)}, log-prob {found[0]:.3f}"]


def choice(seen) -> list[str]:
    t, version = seen.t, int(seen.t.versions[1])
    chances = distribution(seen, 1, version).exp()
    sums, k = chances.cumsum(0), seen.task.alphabet.index(int(t.tokens[1]))
    rows = [
        f"{say(seen.alphabet[i : i + 4]):24} have chances {numbers(chances[i : i + 4])}"
        for i in range(0, len(chances), 4)
    ]
    return [
        f"version {version}, {seen.weights[version].numel():,} parameters, at {say(t.tokens[:1])}:",
        *rows,
        f"{noise(t)[1]:.4f} lies between the sums {sums[k] - chances[k]:.3f} and {sums[k]:.3f}: "
        f"token {say(t.tokens[1:2])}, log-prob {chances[k].log():.3f}",
    ]


def sparse(seen) -> list[str]:
    last, lines, picks, top_chunks = len(seen.t.tokens) - 1, [], [], dsa.top_chunks

    def noted(*arguments) -> torch.Tensor:
        picks.append(top_chunks(*arguments))
        return picks[-1]

    for top_k in (last + 1, 3):
        sparse = {"attention": "dsa", "chunk_size": 1, "top_k": top_k}
        model = model_of(seen, int(seen.t.versions[1]), **sparse)
        with torch.no_grad(), mock.patch.object(dsa, "top_chunks", noted):
            found = logprobs_of(seen, model)
        lines.append(f"top_k {top_k}: log-probs of its tokens {numbers(found)}")
    # The first layer's, of the last query. The last token predicts nothing: it asks for nothing.
    chosen = picks[-model.config.layers][-1, 0].tolist()
    return [*lines, f"top_k 3: token {last - 1} attends to itself, then to the best: {chosen}"]


def swap(seen) -> list[str]:
    t, (old, new) = seen.t, seen.t.swaps[1::2]
    at = int(np.flatnonzero(t.versions == new)[0])
    column = seen.task.alphabet.index(int(t.tokens[at]))
    alone = [float(distribution(seen, at, version)[column]) for version in (old, new)]
    moved = (seen.weights[new] - seen.weights[old]).abs().max()
    return [
        f"stamps in the mailbox, after version {new}: {seen.stamps[new]}",
        f"largest change of a weight from version {old} to {new}: {moved:.4f}",
        f"swaps {t.swaps}",
        f"token {say(t.tokens[at : at + 1])} at position {at}, log-prob as sampled: "
        f"{t.logprobs[at]:.4f}",
        f"with version {old} for all: {alone[0]:.4f}, with version {new} for all: {alone[1]:.4f}",
    ]


def record(seen) -> list[str]:
    t, placed = seen.t, seen.placed[GROUP]
    _, laid, _ = lay_out(read_group(placed, seen.arena).trajectories)
    arrays = dict(zip(ARRAYS, laid, strict=True))
    before = [arrays[name].nbytes for name in ("tokens", "loss_mask", "logprobs", "versions")]
    last = placed.offset + sum(before) - 1  # the last byte of the last version
    (byte,) = os.pread(seen.arena.descriptor, 1, last)
    os.pwrite(seen.arena.descriptor, bytes([byte ^ 1]), last)
    try:
        versions = read_group(placed, seen.arena).trajectories[-1].versions
        answer = f"accepted, last version now {versions[-1]}"
    except ValueError as error:
        answer = f"refused, {str(error).partition('that are ')[2]}"
    return [
        f"tokens     {t.tokens.tolist()}",
        f"loss_mask  {t.loss_mask.astype(int).tolist()}",
        f"logprobs   {numbers(t.logprobs, 2)}",
        f"versions   {t.versions.tolist()}",
        f"turns      {t.turns}",
        f"arrays of the group: {', '.join(f'{k} [{len(a)}]' for k, a in arrays.items() if len(a))}",
        f"one bit flipped: {answer}",
    ]


def verdict(seen) -> list[str]:
    t = seen.t
    return [
        f"answers {split_answers(seen.task, t.tokens, t.turns)}",
        f"rewards of its turns {t.turn_rewards}, reward {t.reward}, finish {t.finish!r}",
    ]


def batch(seen) -> list[str]:
    eta, size, v, t = seen.config.max_staleness, seen.config.groups_per_step, seen.step, seen.t
    lines = [
        f"version {v} trains groups {[group.group_id for group in seen.batch]}",
        f"oldest token of the episode: version {t.oldest}; staleness {v} - {t.oldest} = "
        f"{staleness(t, v)}, at most {eta}",
    ]
    for s in range(v - eta, v + 1):
        stay = sum(start <= s for start in seen.left)
        lines.append(f"left behind that started by version {s}: {stay} <= {(s + eta - v) * size}")
    return lines


def advantages(seen) -> list[str]:
    rewards, advantages = advantages_of(seen)
    return [
        f"rewards of the group   {numbers(rewards)}",
        f"mean {rewards.mean():.3f}, standard deviation {rewards.std():.3f}",
        f"advantages             {numbers(advantages)}",
    ]


def loss_of(seen, model, samples, count: int) -> torch.Tensor:
    """What these samples of the group add to the loss of a step with `count` generated tokens."""
    learner, advantages = dataclasses.replace(seen.run.learner, model=model), advantages_of(seen)[1]
    episodes = [seen.group.trajectories[i] for i in samples]
    credit = [[float(advantages[i])] * len(seen.group.trajectories[i].turns) for i in samples]
    batch = list(zip(episodes, credit, strict=True))
    return micro_batch_loss(learner, batch, False, count, seen.config)[0]


def naive_loss(seen) -> torch.Tensor:
    """The loss that `naive_step` finds for the group alone."""
    episodes, columns = seen.group.trajectories, []
    for name in ("tokens", "loss_mask", "logprobs"):
        rows = [torch.from_numpy(getattr(t, name)) for t in episodes]
        columns.append(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    tokens, mask, behaviour = columns
    model, optimizer = model_of(seen, seen.step), SimpleNamespace(step=lambda: None)
    found = tokens.long(), mask, behaviour, advantages_of(seen)[0]
    return naive_step(model, optimizer, *found, seen.alphabet)


def loss(seen) -> list[str]:
    t, samples = seen.t, [sample for group in seen.batch for sample in group.trajectories]
    count, lengths = sum(s.generated for s in samples), [len(s.tokens) for s in samples]
    model = model_of(seen, seen.step)
    now, sampled = logprobs_of(seen, model).detach(), torch.from_numpy(t.logprobs[t.loss_mask])
    own = sum(s.generated for s in seen.group.trajectories)
    real = loss_of(seen, model, range(seen.config.group_size), own)
    return [
        f"its tokens                 {say(t.tokens[t.loss_mask])}",
        f"log-probs as sampled       {numbers(sampled)}",
        f"log-probs at version {seen.step}     {numbers(now)}",
        f"importance ratio           {numbers((now - sampled).exp())}",
        f"loss of its group alone: {naive_loss(seen):.4f} by naive_step, "
        f"{real:.4f} by micro_batch_loss",
        f"generated tokens in this step: {count}, "
        f"in {len(pack(lengths, seen.config.token_budget))} micro-batches",
        f"its {len(now)} add {loss_of(seen, model, [SAMPLE], count):.4f} "
        f"to a loss of {seen.metrics['loss']:.4f}",
    ]


def gradient(seen) -> list[str]:
    model, after, v = model_of(seen, seen.step), model_of(seen, seen.step + 1), seen.step
    count = sum(sample.generated for group in seen.batch for sample in group.trajectories)
    loss_of(seen, model, [SAMPLE], count).backward()
    moved = (after.flat - model.flat).abs().max()
    return [
        f"norm of its own gradient {float(model.flat_grad.norm()):.3f}, of the step's "
        f"{seen.metrics['grad_norm']:.3f}, clipped to 1",
        f"learning rate {seen.metrics['lr']:.5f}, largest change of a weight {moved:.5f}",
        f"log-probs at version {v}     {numbers(logprobs_of(seen, model).detach())}",
        f"log-probs at version {v + 1}     {numbers(logprobs_of(seen, after).detach())}",
    ]


def steps(seen) -> list[str]:
    lines = ["step     loss  gradient norm  largest ratio  mean reward  learning rate"]
    for number, (_, m, _) in enumerate(seen.steps):
        line = f"{number:4}{m['loss']:9.4f}{m['grad_norm']:15.3f}{m['ratio_max']:15.3f}"
        lines.append(f"{line}{m['reward']:13.3f}{m['lr']:15.5f}")
    return lines


def log(seen) -> list[str]:
    lines, keep = [], ("kind", "group", "groups", "version", "worker", "digest", "swaps")
    for number, event in enumerate(read_lines(seen.run.folder / "events.jsonl"), start=1):
        if GROUP in (event.get("group"), *event.get("groups", ())):
            if "digest" in event:  # it depends on every bit, so on the processor
                event |= {"digest": hex(event["digest"]), "swaps": event["swaps"][SAMPLE]}
            shown = {name: event[name] for name in keep if name in event}
            lines.append(f"line {number}: {json.dumps(shown)}")
    return lines


def ledger(seen) -> list[str]:
    books = audit(seen.run.folder)
    return [f"{books.events} events", *table(books.totals()).splitlines()]


def replay(seen) -> list[str]:
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            train_async.train(dataclasses.replace(Config(), replay=str(seen.run.folder)))
    except TrainingStopped as error:
        return [str(error)]
    return told.getvalue().replace("weights ", "weights 0x").splitlines()


def agent(seen) -> list[str]:
    seen.agents = agents = play_agents(dataclasses.replace(Config(), **AGENTS))
    task, group = agents.task, agents.group
    lines = [f"{group.problem['prompt']!r}, the way is {' '.join(group.problem['way'])}"]
    for t in group.trajectories:
        told = [t.tokens[stop:start] for (_, stop), (start, _) in pairwise([*t.turns, (None, 0)])]
        told = [task.tokenizer.decode_bytes(tokens.tolist()).decode() for tokens in told]
        said = split_answers(task, t.tokens, t.turns)
        talk = "  ".join(f"{a} {o.strip()}".strip() for a, o in zip(said, told, strict=True))
        failure = f"{t.finish}: {t.failure.partition(' (')[0]}"  # without file and line
        end = failure if t.failed else f"rewards {numbers(t.turn_rewards, 2)}"
        lines.append(f"sample {t.sample_index}  {talk:32} {end}")
    trained = [t.sample_index for t in repaired(group)]
    return [*lines, f"a reason to discard the group: {unfit(group)}; trained are {trained}"]


def credit(seen) -> list[str]:
    group, config, learner = seen.agents.group, seen.agents.config, seen.agents.learner
    by_episode = samples_of(learner, [group], dataclasses.replace(config, credit="episode"))[0]
    by_turn = samples_of(learner, [group], config)[0]
    rows = {"by episode": [turns[0] for _, turns in by_episode]}
    for turn in range(max(len(turns) for _, turns in by_turn)):
        rows[f"turn {turn + 1}"] = [(turns + [math.nan] * 9)[turn] for _, turns in by_turn]
    t, turns = by_turn[1]
    given = in_the_loss(learner, t, turns, config)
    at = range(t.turns[0][0], len(t.tokens))
    said = "".join(f"{say(t.tokens[i : i + 1]):>8}" for i in at)
    heard = [f"{next(given):.3f}" if t.loss_mask[i] else "." for i in at]
    return [
        f"trained      {' '.join(f'{t.sample_index:7}' for t, _ in by_turn)}",
        f"reward       {numbers(t.reward for t, _ in by_turn)}",
        *[f"{name:12} {numbers(row)}".replace("nan", "  .") for name, row in rows.items()],
        f"sample {t.sample_index}    {said}",
        f"in the loss {''.join(f'{x:>8}' for x in heard)}",
    ]


def in_the_loss(learner, t, turns: list, config: Config):
    """The advantages that the objective is given for an episode, one for each of its tokens."""
    found, policy_loss = [], losses.policy_loss

    def noted(objective, tokens, *rest):
        found.extend(tokens.advantages.tolist())
        return policy_loss(objective, tokens, *rest)

    with mock.patch.object(losses, "policy_loss", noted):
        micro_batch_loss(learner, [(t, turns)], False, t.generated, config)
    assert len(found) == t.generated, "an observation is in the loss"
    return iter(found)


BEFORE = (problem, admission, slot, choice, sparse, swap, record, verdict, batch)
STATIONS = (*BEFORE, advantages, loss, gradient, steps, log, ledger, replay, agent, credit)


def walk() -> dict[str, list[str]]:
    """Every station's lines; an exception is the last station's only line, and ends the walk."""
    lines: dict[str, list[str]] = {}
    hush = contextlib.redirect_stderr(io.StringIO())  # progress bars
    with tempfile.TemporaryDirectory() as folder, hush:
        try:
            seen = follow(run_by_count(Path(folder) / "run"))
            for station in STATIONS:
                lines[station.__name__] = station(seen)
        except Exception as error:
            lines["stopped"] = [f"{type(error).__name__}: {error}"]
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, lines in walk().items():
        print("\n".join([name, *lines, ""]))
