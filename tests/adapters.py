"""Which function an exercise's test looks at: the project's own, or the one of the module in IMPL.

`IMPL=exercises.mine pytest -m ex06` judges exercises/mine.py. Without IMPL the same tests guard the
project: where an exercise is one of its functions, that function itself is tested; where it is a
part of something larger, the few lines below call that part with the exercise's arguments.
"""

import importlib
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dsa
import losses
import rollout
import train_async
from buffer import Buffer, repaired, unfit
from buffer import may_admit as admissible
from buffer import staleness as staleness_of
from losses import group_advantages  # noqa: F401 (fetched by `project`, as the next ones are)
from methods import critic, dampers
from methods.turns import turn_advantages  # noqa: F401
from model import dense_packed, pack_tokens
from rollout import sample, uniforms
from runtime.config import Config
from runtime.messages import Group, Trajectory
from runtime.tokenizer import own_tokenizer

NAMES = {
    "ex01": "causal_attention",
    "ex02": "index_scores",
    "ex03": "select",
    "ex04": "sparse_attention",
    "ex05": "group_advantages",
    "ex06": "token_mean",
    "ex07": "tis",
    "ex08": "double_sided",
    "ex09": "damp",
    "ex10": "draw",
    "ex11": "staleness",
    "ex12": "may_admit",
    "ex13": "next_batch",
    "ex14": "resume",
    "ex15": "swap_weights",
    "ex17": "row_dots",
    "ex18": "sparse_tile",
    "ex19": "turn_advantages",
    "ex20": "repair",
    "ex21": "skip_observation_gae",
}


def get(exercise: str):
    """The function to test: IMPL's, or the project's when IMPL is not set."""
    name = os.environ.get("IMPL")
    return project(exercise) if not name else learners(name, exercise)


def learners(name: str, exercise: str):
    """An exercise's function in the module `name`; a missing one fails with what to do."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.split(".")[0]):
            raise  # the module is there, and what it imports is not
        pytest.fail(f"IMPL={name}: no such module; cp exercises/stubs.py exercises/mine.py")
    if not hasattr(module, NAMES[exercise]):
        pytest.fail(f"IMPL={name}: has no function {NAMES[exercise]}, see exercises/stubs.py")
    return getattr(module, NAMES[exercise])


def project(exercise: str):
    """The project's own solution of an exercise."""
    return globals()[NAMES[exercise]]


def causal_attention(q, k, v, lengths):
    """model.py: attention of a packed forward pass; the tokens themselves play no part."""
    return dense_packed(q, k, v, pack_tokens([[0] * n for n in lengths]))


def index_scores(q_index, k_index, weights):
    """dsa.py: one packed sequence, chunks of one key."""
    tables = dsa.packed_tables(torch.tensor([0, len(q_index)]), chunk_size=1)
    return dsa.index_scores(q_index, k_index[:, None], weights, tables)[:, 0]


def select(scores, past, top_k):
    """dsa.py: `top_chunks`, one sequence, one head; of its tables it reads `past` and `first`."""
    width = scores.shape[1]
    chunk, zero = torch.arange(width), torch.zeros_like(past)
    tables = dsa.Tables(1, width, width, 1, False, chunk, past, zero)
    return dsa.top_chunks(scores[:, None], tables, top_k)[:, 0]


def sparse_attention(q, k, v, selected, chunk_size):
    """dsa.py: one packed sequence, one selection for all heads."""
    tables = dsa.packed_tables(torch.tensor([0, len(q)]), chunk_size)
    return dsa.sparse_attention(q, k, v, selected[:, None], tables)


def token_mean(values, mask, count):
    """losses.py: `token_mean` of what the policy generated; learner.py selects that once a step."""
    assert values.shape == mask.shape, (values.shape, mask.shape)
    return losses.token_mean(values[mask], count)


def tis(logprobs, proximal, behaviour, advantages, mask, count, low, high, cap):
    """losses.py: the loss of the objective, without its statistics."""
    constants = losses.Constants(eps_low=low, eps_high=high, tis_cap=cap)
    values = (logprobs, proximal, behaviour, advantages, torch.zeros_like(mask, dtype=torch.int64))
    tokens = losses.Tokens(*[each[mask] for each in values])
    return losses.policy_loss("tis", tokens, count, constants)[0]


def double_sided(logprobs, behaviour, advantages, mask, count, low, high):
    """losses.py: the loss of the objective, without its statistics."""
    constants = losses.Constants(double_low=low, double_high=high)
    values = (logprobs, behaviour, behaviour, advantages, torch.zeros_like(mask, dtype=torch.int64))
    tokens = losses.Tokens(*[each[mask] for each in values])
    return losses.policy_loss("double_sided", tokens, count, constants)[0]


def damp(window, kl):
    """methods/dampers.py: `kl`, of which the gradient plays no part."""
    memory, config = {"window": list(window)}, Config(kl_threshold=0.15)
    _, scale = dampers.kl(None, memory, {"kl_reference": kl}, config)
    return memory["window"], scale, memory["reference_factor"]


def draw(logits, keys, positions, temperature):
    """rollout.py: `uniforms`, then `sample`."""
    return sample(logits, torch.from_numpy(uniforms(keys, positions)), temperature)


def staleness(versions, loss_mask, version):
    """buffer.py: the staleness of a trajectory of which nothing else matters."""
    return staleness_of(Trajectory(0, 0, 0, loss_mask=loss_mask, versions=versions), version)


def may_admit(starts, version, start, groups_per_step, max_staleness):
    """buffer.py: the rule itself, which wants the starts in order."""
    return admissible(sorted(starts), start, version, max_staleness, groups_per_step)


def next_batch(completed, running, version, groups_per_step, max_staleness):
    """buffer.py: a buffer with these groups complete, and the others without a name."""
    buffer = Buffer(groups_per_step, max_staleness)
    buffer.completed = {i: Group(i, start, {}) for i, start in completed}
    unnamed = {-1 - i: start for i, start in enumerate(running)}
    for group_id, start in (dict(completed) | unnamed).items():
        buffer.outstanding[group_id] = start
    batch = buffer.next_batch(version)
    return None if batch is None else [group.group_id for group in batch]


def resume(in_flight, completed, next_group, version, groups_per_step, max_staleness):
    """As an asynchronous run begins (`take_up`), had it kept what was complete: then `admit` for
    all that is left. A run never has more in flight than may be admitted again; a case of the
    exercise has."""
    buffer = Buffer(groups_per_step, max_staleness)
    buffer.completed = {i: Group(i, start, {}) for i, start in completed.items()}
    buffer.outstanding = dict(completed)
    waiting = [group_id for group_id in in_flight if group_id not in completed]
    while waiting and buffer.may_admit(version):
        buffer.admit(waiting.pop(0), version)
    run = SimpleNamespace(
        config=Config(groups_per_step=groups_per_step, steps=version + 10**6),
        learner=SimpleNamespace(version=version, cursor=next_group),
        buffer=buffer,
        task=SimpleNamespace(
            reset=lambda *_: {"prompt": "1"}, max_prompt_tokens=1, tokenizer=own_tokenizer()
        ),
        pool=SimpleNamespace(issue=lambda groups: ["a worker" for _ in groups]),
        log=SimpleNamespace(event=lambda *args, **details: None),
    )
    train_async.admit(run)
    return buffer.outstanding, waiting, run.learner.cursor


def swap_weights(model, cache, flat, tokens, cached, running):
    """rollout.py: a generator in the middle of these episodes adopts the weights."""
    alphabet, (slots, capacity) = np.arange(model.config.vocab_size), tokens.shape
    environment = rollout.Environment(None, None, alphabet, frozenset(), turn_tokens=1)
    config = Config(slots=slots, group_size=1, swap="recompute")
    generator = rollout.Generator(model, environment, config, capacity)
    generator.cache = cache
    for b in np.flatnonzero(running):
        slot = rollout.Slot(
            b, Trajectory(0, 0, 0), tokens=tokens[b].tolist(), cached=int(cached[b])
        )
        generator.batch[b] = slot
    generator.set_weights(1, flat)
    generator._adopt()


def row_dots(x, y):
    """In the project this is a part of the kernel `_backward_q`. Here it is alone."""
    import row_dots

    return row_dots.row_dots(x, y)


def sparse_tile(q, k, v, chunks, chunk_size, position):
    """dsa_triton.py: attention of one cached slot, whose query heads share one key head."""
    import dsa_triton

    lengths = torch.tensor([position + 1], device=q.device)
    # the project refuses chunks of the future, the exercise hides them
    chunks = torch.where(chunks * chunk_size > position, -1, chunks)
    tables = dsa.cache_tables(lengths, len(k), chunk_size)
    return dsa_triton.sparse_attention(q[None], k[:, None], v[:, None], chunks[None, None], tables)[
        0
    ]


def repair(failures):
    """buffer.py: `unfit` and, if nothing speaks against the group, `repaired`."""
    episodes = [Trajectory(0, i, 0, finish=why or "stop") for i, why in enumerate(failures)]
    group = Group(0, 0, {}, episodes)
    return unfit(group) or [t.sample_index for t in repaired([group])]


def skip_observation_gae(rewards, values, mask, lengths, gamma, lam):
    """methods/critic.py: the estimator sees generated tokens only."""
    own = [int(part.sum()) for part in mask.split(lengths)]
    result = torch.zeros_like(values).detach()
    result[mask] = critic.skip_observation_gae(rewards[mask], values[mask], own, lam, gamma)
    return result
