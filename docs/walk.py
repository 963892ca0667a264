"""docs/walk.py: the run that docs/tour.md follows, and what one episode looks like in each room.

    python docs/walk.py

A training run of six steps, made of the trainers' own functions in one process. While "the learner
computes" the generator goes on for a counted number of tokens, and not by a clock, so every walk
is the same. Left out: real processes, which have a clock; the page and its experiments (tour.py).
"""

import contextlib
import dataclasses
import io
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dsa
import losses
import train_async
from buffer import Buffer, staleness
from learner import learner_step, pack, token_logprobs
from model import pack_tokens
from reward import split_answers, verify_group
from rollout import uniforms
from runtime.checkpoint import sha256_of
from runtime.config import Config, TrainingStopped
from runtime.ledger import Ledger, audit, table
from runtime.mailbox import Mailbox
from runtime.messages import Group, from_bytes, group_to_parts, to_bytes
from runtime.runlog import read_lines
from runtime.setup import make_generator, make_model, open_training
from runtime.tokenizer import decode_bytes, encode

FLAGS = dict(groups_per_step=4, group_size=4, slots=24, steps=6, max_staleness=2, seed=0)
FLAGS |= dict(eval_every=1000, reference_every=2, lr=0.003, entropy=0.0, kl_threshold=0.15)
FLAGS |= dict(token_budget=160)  # two micro-batches a step
GROUP, SAMPLE = 18, 2  # whom the page follows
MEANWHILE = 4  # tokens that a slot generates while the learner computes one step
PATIENCE = 200  # tokens after which a batch should be there

# ------------------------------------------------------------------------------------- the run


def one_worker(generator) -> SimpleNamespace:
    """What the trainer's functions need of a Pool: one generator behind it, and no process."""
    worker = SimpleNamespace(name="rollout-0", role="rollout", number=0)

    def send(worker, kind: str, header: dict) -> None:
        for order in header["orders"]:
            generator.submit(Group(*order))

    return SimpleNamespace(relayed=set(), of=lambda role: [worker], send=send)


def run_by_count(folder: Path) -> SimpleNamespace:
    """Train six steps with the parts of train_async.py; returns what the stations look at."""
    config = dataclasses.replace(Config(), out=str(folder), **FLAGS)
    config, task, run, learner, watch, _ = open_training(config, "async", "cpu")
    generator = make_generator(config, task, make_model(config, task))
    generator.version = -1  # the first weights come from the mailbox, too
    buffer = Buffer(config.groups_per_step, config.max_staleness, config.on_stale)
    flights, ledger = train_async.Flights(one_worker(generator)), Ledger()
    totals = {"tokens": 0, "status": {}, "lost": [], "begin": None}
    seen = SimpleNamespace(config=config, task=task, run=run, weights=[], stamps=[])
    seen.admitted, seen.messages, seen.steps = {}, {}, []

    def publish(mailbox: Mailbox) -> None:
        mailbox.publish(learner.version, learner.model.flat)
        watch.event("learner", "publish", version=learner.version)
        seen.stamps.append(mailbox.stamps.tolist())
        seen.weights.append(learner.model.flat.clone())

    def admit() -> None:
        train_async.admit(learner, buffer, flights, [], config, task, watch)
        more = buffer.may_admit(learner.version)
        for place, group_id in enumerate(buffer.outstanding, start=1):
            seen.admitted.setdefault(group_id, (learner.version, place, more))

    def tell(kind: str, header: dict, original: tuple | None = None) -> None:
        message = kind, flights.pool.of("rollout")[0], header, original
        train_async.handle(message, buffer, flights, learner.version, watch, totals)

    def boundary(mailbox: Mailbox) -> None:
        """One token for every slot of the rollout worker, then what it has to say."""
        if mailbox.version > generator.newest:
            generator.set_weights(*mailbox.read())
        generator.step()
        tell("group", {"events": generator.events, "status": generator.counts})
        generator.events = []
        for group in generator.take_finished():
            seen.messages[group.group_id] = message = to_bytes(*group_to_parts(group))
            answer = {"group_id": group.group_id, "verdicts": verify_group(group, task, config)}
            tell("scores", answer | {"began": watch.start, "seconds": 0.0}, from_bytes(message))

    def step(batch: list[Group]) -> None:
        details = {"version": learner.version, "groups": [group.group_id for group in batch]}
        metrics = learner_step(learner, batch, config)
        details |= {"of": config.steps} | {name: metrics[name] for name in ("loss", "grad_norm")}
        watch.event("learner", "train", in_flight=len(buffer.outstanding), **details)
        seen.steps.append((batch, metrics, sorted(buffer.outstanding.values())))

    with contextlib.closing(Mailbox(learner.model.flat.numel())) as mailbox:
        publish(mailbox)
        while learner.version < config.steps:
            admit()
            waited = 0
            while (batch := buffer.next_batch(learner.version)) is None:
                assert waited < PATIENCE, "the learner waits for ever: no batch may be trained"
                boundary(mailbox)
                waited += 1
            for _ in range(MEANWHILE):
                boundary(mailbox)
            step(batch)
            publish(mailbox)
            train_async.settle(ledger, watch, buffer, flights, [])
    watch.close()
    summary = {"steps": config.steps, "weights_sha256": sha256_of(learner.model.flat)}
    (run / "summary.json").write_text(json.dumps(summary | {"ledger": ledger.totals()}))
    return seen


def follow(seen: SimpleNamespace) -> SimpleNamespace:
    """Pick out whom the page follows: episode `t` of `group`, trained by step number `step`."""
    batches = [[group.group_id for group in batch] for batch, *_ in seen.steps]
    seen.step = next(i for i, ids in enumerate(batches) if GROUP in ids)
    seen.batch, seen.metrics, seen.left = seen.steps[seen.step]
    seen.group = seen.batch[batches[seen.step].index(GROUP)]
    seen.t = seen.group.trajectories[SAMPLE]
    seen.alphabet = torch.tensor(seen.task.alphabet)
    return seen


# -------------------------------------------------------------------------- helpers of the stations


def numbers(values, digits: int = 3) -> str:
    """Numbers in one line, with so few digits that every processor prints the same."""
    return " ".join(f"{float(value):7.{digits}f}" for value in values)


def say(tokens) -> str:
    """Token ids as text, each token in quotes."""
    return " ".join(repr(decode_bytes([int(token)]).decode()) for token in tokens)


def model_of(seen, version: int, **changes):
    """The policy of a version, or one with its weights and another kind of attention."""
    model = make_model(dataclasses.replace(seen.config, **changes), seen.task)
    model.flat.copy_(seen.weights[version])
    return model


@torch.no_grad()
def distribution(seen, at: int, version: int) -> torch.Tensor:
    """Log-probs [V] of all that could be said at a position, with one policy for the whole past."""
    model = model_of(seen, version)
    hidden = model(pack_tokens([seen.t.tokens[:at]]))[-1:]
    return model.logits(hidden, seen.alphabet).log_softmax(-1)[0]


def logprobs_of(seen, model) -> torch.Tensor:
    """Log-probs of the episode's own tokens, as the learner computes them, with gradient."""
    return token_logprobs(model, [seen.t], seen.alphabet, seen.config.temperature)[0]


def advantages_of(seen) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and advantages of the four episodes of the group."""
    rewards = torch.tensor([[sample.reward for sample in seen.group.trajectories]])
    advantages, _ = losses.group_advantages(rewards, seen.config.advantage)
    return rewards[0], advantages[0]


# ------------------------------------------------------------------------------------ the stations


def problem(seen) -> list[str]:
    prompt, alphabet = seen.group.problem["prompt"], seen.task.alphabet
    return [
        f"prompt        {prompt!r}, as tokens {encode(prompt)}",
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
    return uniforms(np.full(len(t.tokens), t.seed), np.arange(len(t.tokens)))


def slot(seen) -> list[str]:
    t, lines = seen.t, ["position  token    by           uniform  log-prob  version"]
    for i, (token, uniform) in enumerate(zip(t.tokens, noise(t), strict=True)):
        by = "prompt" if not i else "policy" if t.loss_mask[i] else "environment"
        drawn = f"{uniform:8.4f}{t.logprobs[i]:10.3f}{t.versions[i]:9}" if t.loss_mask[i] else ""
        lines.append(f"{i:8}  {say([token]):9}{by:12}{drawn}".rstrip())
    return lines


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
    t, message = seen.t, bytearray(seen.messages[GROUP])
    _, arrays = from_bytes(bytes(message))
    message[-1] ^= 1  # one bit of the last version
    try:
        answer = f"accepted, last version now {from_bytes(bytes(message))[1]['versions'][-1]}"
    except ValueError as error:
        answer = f"refused, {str(error).partition(' is ')[2]}"
    return [
        f"tokens     {t.tokens.tolist()}",
        f"loss_mask  {t.loss_mask.astype(int).tolist()}",
        f"logprobs   {numbers(t.logprobs, 2)}",
        f"versions   {t.versions.tolist()}",
        f"turns      {t.turns}",
        f"arrays of the group: {', '.join(f'{k} {list(a.shape)}' for k, a in arrays.items())}",
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


def own_loss(seen, model, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The episode's share of the step's loss, its log-probs, and its importance ratios."""
    now, behaviour = logprobs_of(seen, model), torch.from_numpy(seen.t.logprobs[seen.t.loss_mask])
    mask, sequence = torch.ones_like(now, dtype=torch.bool), torch.zeros(len(now)).long()
    advantage = advantages_of(seen)[1][SAMPLE].expand(len(now))
    loss, _ = losses.OBJECTIVES[seen.config.objective](
        now, now.detach(), behaviour, advantage, mask, sequence, count, losses.Constants()
    )
    return loss, now.detach(), losses.log_ratio(now.detach(), behaviour, mask).exp()


def loss(seen) -> list[str]:
    t, samples = seen.t, [sample for group in seen.batch for sample in group.trajectories]
    count, lengths = sum(s.generated for s in samples), [len(s.tokens) for s in samples]
    share, now, ratio = own_loss(seen, model_of(seen, seen.step), count)
    packed = pack(lengths, seen.config.token_budget)
    return [
        f"its tokens                 {say(t.tokens[t.loss_mask])}",
        f"log-probs as sampled       {numbers(t.logprobs[t.loss_mask])}",
        f"log-probs at version {seen.step}     {numbers(now)}",
        f"importance ratio           {numbers(ratio)}",
        f"generated tokens in this step: {count}, in {len(packed)} micro-batches",
        f"its {len(now)} add {share.item():.4f} to a loss of {seen.metrics['loss']:.4f}",
    ]


def gradient(seen) -> list[str]:
    model, after, v = model_of(seen, seen.step), model_of(seen, seen.step + 1), seen.step
    count = sum(sample.generated for group in seen.batch for sample in group.trajectories)
    share, now, _ = own_loss(seen, model, count)
    share.backward()
    moved = (after.flat - model.flat).abs().max()
    return [
        f"norm of its own gradient {float(model.flat_grad.norm()):.3f}, of the step's "
        f"{seen.metrics['grad_norm']:.3f}, clipped to {seen.config.grad_clip}",
        f"learning rate {seen.metrics['lr']:.5f}, largest change of a weight {moved:.5f}",
        f"log-probs at version {v}     {numbers(now)}",
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
    for number, event in enumerate(read_lines(seen.run / "events.jsonl"), start=1):
        if GROUP in (event.get("group"), *event.get("groups", ())):
            if "digest" in event:  # it depends on every bit, so on the processor
                event |= {"digest": hex(event["digest"]), "swaps": event["swaps"][SAMPLE]}
            shown = {name: event[name] for name in keep if name in event}
            lines.append(f"line {number}: {json.dumps(shown)}")
    return lines


def ledger(seen) -> list[str]:
    events, books = audit(seen.run)
    return [f"{events} events", *table(books.totals()).splitlines()]


def replay(seen) -> list[str]:
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            train_async.train(dataclasses.replace(Config(), replay=str(seen.run)))
    except TrainingStopped as error:
        return [str(error)]
    return told.getvalue().replace("weights ", "weights 0x").splitlines()


BEFORE = (problem, admission, slot, choice, sparse, swap, record, verdict, batch)
STATIONS = (*BEFORE, advantages, loss, gradient, steps, log, ledger, replay)


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
