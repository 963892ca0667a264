"""logprobs.py: what a policy says of tokens that were generated: their log-probs and entropies.

By the distribution that they were sampled from: the alphabet of the task, the temperature, and what
top-k and top-p have kept. The learner asks this of the policy, of the reference and of a teacher.
Left out: the network (model.py), sampling (rollout.py).

Axes: M generated tokens of a micro-batch · d model width · V' tokens of the alphabet · V of all
      K tokens that sampling kept · B sequences, T tokens of each
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from buffer import pack
from model import GPT, Packed, pack_tokens, padded, recomputed
from reward import Task, alphabet_of
from runtime.config import Config

# logits that are there at once: 256 MiB in float32. Each piece reads and writes the gradient of the
# whole output matrix: by arithmetic, 151,936 words and a quarter of this double the products' time
PIECE = 1 << 26


def words_of(task: Task, device="cpu") -> tuple:
    """The token ids that a policy may emit [V'], and where there are several tasks what each of
    them allows (`allowed_of`)."""
    alphabet = torch.from_numpy(alphabet_of(task)).to(device)
    return alphabet, allowed_of(alphabet, [alphabet_of(part) for part in task.parts or (task,)])


def allowed_of(alphabet: Tensor, alphabets: list) -> Tensor | None:
    """What is added to logits [V'] in each of several tasks, [tasks, V']: -1e9 where a token is not
    in its own alphabet; None for one task, which has the whole."""
    if len(alphabets) == 1:
        return None
    own = [torch.isin(alphabet, torch.as_tensor(ids).to(alphabet)) for ids in alphabets]
    return (torch.stack(own).float() - 1) * 1e9


def token_logprobs(model: GPT, batch: list, who, config: Config) -> tuple:
    """Log-probs [M] and entropies [M] of the generated tokens, in order of the trajectories, and
    the hidden states [M, d] that predict them.

    batch: pairs of a trajectory and anything else; who: a learner or a teacher, whose `alphabet`
    and `allowed` say what may be emitted.
    """
    device = model.flat.device
    packed = pack_tokens([t.tokens for t, _ in batch], device)
    names = "loss_mask", "kept_sizes", "kept"
    arrays = [np.concatenate([getattr(t, name) for t, _ in batch]) for name in names]
    mask, *kept = (torch.from_numpy(x).to(device) for x in arrays)
    limits = None
    if who.allowed is not None:
        kinds = [t.group_id % len(who.allowed) for t, _ in batch for _ in range(t.generated)]
        limits = who.allowed, torch.tensor(kinds, device=device)
    how = who.alphabet, config.temperature, *kept
    return generated_logprobs(model, packed, mask.nonzero()[:, 0], *how, limits=limits)


@torch.no_grad()
def policy_logprobs(model: GPT, trajectories: list, who, config: Config) -> list:
    """What a policy says of whole episodes: log-probs of the generated tokens of each [M]; on the
    CPU, no gradient. who: see `token_logprobs`."""
    found = [torch.empty(0)] * len(trajectories)
    some = [i for i, t in enumerate(trajectories) if t.generated]
    for places in pack([len(trajectories[i].tokens) for i in some], config.token_budget):
        batch = [(trajectories[some[place]], 0.0) for place in places]
        logprobs, *_ = token_logprobs(model, batch, who, config)
        pieces = logprobs.float().cpu().split([t.generated for t, _ in batch])
        for place, piece in zip(places, pieces, strict=True):
            found[some[place]] = piece
    return found


def generated_logprobs(
    model: GPT,
    packed: Packed,
    rows,  # [M] tokens of the batch
    alphabet,  # [V'] token ids, the generator's
    temperature: float,  # the generator's
    sizes=(),  # [M] from how many tokens each was sampled; []: from all
    kept=(),  # [K] from which ones: token ids, laid end to end
    limits=None,  # of several tasks: `allowed_of` [tasks, V'], and the task of each token [M]
) -> tuple:
    """Log-probs [M] and entropies [M] of the tokens at `rows`, with gradient, by the distribution
    that they were sampled from: among the tokens that were kept. And the hidden states [M, d].

    Token r is predicted by token r - 1, so none may be the first of its sequence. No other hidden
    state reaches the output matrix. Logits are never there for more than PIECE pairs of a token and
    a word: what is over is computed piece by piece, and again in the backward pass.
    """
    shared, wanted, copies = share_prefixes(packed, rows - 1)
    hidden = model(shared, wanted).index_select(0, copies)  # [M, d]
    places = torch.full_like(model.output.weight[:, 0], -1, dtype=torch.int64)  # [V]
    places[alphabet] = torch.arange(len(alphabet), device=places.device)
    targets = places[packed.tokens[rows]]  # [M], places in the alphabet
    assert (targets >= 0).all(), f"generated tokens must be in the alphabet {alphabet}"

    def piece(hidden, targets, first=0):
        logits = model.logits(hidden, alphabet)  # [m, V']
        if limits:
            logits = logits + limits[0][limits[1][first : first + len(hidden)]]
        if len(sizes):
            own, before = sizes[first : first + len(hidden)], sizes[:first].sum()
            at = torch.arange(len(own), device=own.device).repeat_interleave(own)  # [k]
            left_out = torch.ones_like(logits, dtype=torch.bool)
            inside = places[kept[before : before + len(at)]]
            assert (inside >= 0).all(), f"kept tokens must be in the alphabet {alphabet}"
            left_out[at, inside] = False
            logits = logits.masked_fill(left_out, -1e9)  # not -inf: 0 times it is NaN
        logprobs = torch.log_softmax(logits / temperature, -1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy

    size = PIECE // len(alphabet)
    if len(rows) <= size:
        return *piece(hidden, targets), hidden
    firsts = range(0, len(rows), size)
    pieces = map(partial(recomputed, piece), hidden.split(size), targets.split(size), firsts)
    return *(torch.cat(part) for part in zip(*pieces, strict=True)), hidden


# ------------------------------------------------------- what is in common is computed once


def share_prefixes(packed: Packed, rows: Tensor) -> tuple:
    """Leaves out of a packed batch what would be computed twice, and what nobody reads.

    Answers to one prompt begin alike, and equal beginnings have equal hidden states: they are
    computed once. `rows` [M] are the tokens whose hidden states are read; nobody attends to what
    stands in a sequence after the last of them. The rest of the model can be read without this.

    packed: what `pack_tokens` returns. Returns another one, with U distinct tokens, and sequences
    of which none is the beginning of another; wanted [R], those of the U that are read; and
    copies [M], with which `hidden[copies]` is what was asked for.

    On one CPU thread, forward and backward of groups of 16 take 33 ms instead of 42 in `guess`, 85
    instead of 133 in `sum`.
    """
    tensors = (packed.tokens, packed.grid, packed.cell[rows])
    tokens, grid, cells = (x.cpu().numpy() for x in tensors)
    B, T = grid.shape
    b, t = np.divmod(cells, T)  # [M] their sequences and places
    last = np.full((B, 1), -1)
    np.maximum.at(last[:, 0], b, t)
    T = padded(last.max() + 1)
    tree = np.where(np.arange(T) > last, -1, tokens[grid[:, :T]])  # [B, T] token ids

    # In sorted order, no sequence has a longer beginning in common with an earlier one than with
    # the one just before it. Any order of bytes will do: -1 is all ones, so the longer come first.
    order = sorted(range(B), key=lambda b: tree[b].tobytes())
    tree = tree[order]
    new = tree >= 0  # [B, T] tokens that the sequence before does not have
    new[1:] &= np.logical_or.accumulate(tree[1:] != tree[:-1], axis=1)
    numbers = new.cumsum().reshape(B, T) * new
    numbers = np.maximum.accumulate(numbers, axis=0) - 1  # [B, T] distinct token in each cell
    wanted, copies = np.unique(numbers[np.argsort(order)[b], t], return_inverse=True)

    kept = new.any(axis=1)  # the other sequences are beginnings of these
    arrays = (
        tree[new],
        new.nonzero()[1],
        np.where(tree < 0, -1, numbers)[kept],
        np.flatnonzero(new[kept]),
        wanted,
        copies,
    )
    *fields, wanted, copies = (torch.from_numpy(x).to(packed.tokens.device) for x in arrays)
    return Packed(*fields), wanted, copies
