"""logprobs.py: what a policy says of tokens that were generated: their log-probs and entropies.

By the distribution that they were sampled from: the alphabet of the task, at the temperature. The
learner asks this of the policy, of the reference and of a teacher.
Left out: the network (model.py), sampling (rollout.py).

Axes: M generated tokens of a micro-batch · d model width · V' tokens of the alphabet · V of all
"""

from functools import partial

import numpy as np
import torch

from fast.fused import fused
from fast.prefixes import hidden_states
from methods.sampling import among_kept
from model import GPT, Packed, pack_tokens, recomputed
from runtime.config import Config

# logits that are there at once: 256 MiB in float32, on a GPU four times as many. Each piece reads
# and writes the gradient of the whole output matrix
PIECE = 1 << 26


def token_logprobs(model: GPT, batch: list, who, config: Config) -> tuple:
    """Log-probs [M] and entropies [M] of the generated tokens, in order of the trajectories, and
    the hidden states [M, d] that predict them.

    batch: pairs of a trajectory and anything else; who: a learner or a teacher, whose `alphabet`
    may be emitted.
    """
    device = model.flat.device
    packed = pack_tokens([t.tokens for t, _ in batch], device)
    names = "loss_mask", "kept_sizes", "kept"
    arrays = [np.concatenate([getattr(t, name) for t, _ in batch]) for name in names]
    mask, *kept = (torch.from_numpy(x).to(device) for x in arrays)
    rows = mask.nonzero()[:, 0]
    return generated_logprobs(model, packed, rows, who.alphabet, config.temperature, *kept)


def generated_logprobs(
    model: GPT,
    packed: Packed,
    rows,  # [M] tokens of the batch
    alphabet,  # [V'] token ids, the generator's
    temperature: float,  # the generator's
    kept_sizes=(),  # [M] and `kept` [K], where sampling was cut: see methods/sampling.py
    kept=(),
) -> tuple:
    """Log-probs [M] and entropies [M] of the tokens at `rows`, with gradient, by the distribution
    that they were sampled from. And the hidden states [M, d].

    Token r is predicted by token r - 1, so none may be the first of its sequence. No other hidden
    state reaches the output matrix. Logits are never there for more than PIECE pairs of a token and
    a word: what is over is computed piece by piece, and again in the backward pass.
    """
    hidden = hidden_states(model, packed, rows - 1)  # [M, d]
    place_of = torch.full_like(model.output.weight[:, 0], -1, dtype=torch.int64)  # [V]
    place_of[alphabet] = torch.arange(len(alphabet), device=place_of.device)
    targets = place_of[packed.tokens[rows]]  # [M], places in the alphabet
    assert (targets >= 0).all(), f"generated tokens must be in the alphabet {alphabet}"

    def piece(hidden, targets, start):
        logits = model.logits(hidden, alphabet)  # [m, V']
        if len(kept_sizes):
            logits = among_kept(logits, start, kept_sizes, place_of[kept])
        return fused(chosen, logits.is_cuda and len(alphabet) >= 8192)(logits, targets, temperature)

    size = (PIECE << 2 * hidden.is_cuda) // len(alphabet)
    apart = piece if len(rows) <= size else partial(recomputed, piece)
    parts = zip(
        hidden.split(size), targets.split(size), range(0, len(rows) or 1, size), strict=True
    )
    logprobs, entropies = zip(*[apart(*part) for part in parts], strict=True)
    return torch.cat(logprobs), torch.cat(entropies), hidden


def chosen(logits, targets, temperature: float) -> tuple:
    """Log-probs [m] of the targets by logits [m, V'], and the entropies [m] of all."""
    logprobs = torch.log_softmax(logits / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy
