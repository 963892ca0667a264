"""sampling.py: nucleus sampling (top-p, arXiv 1904.09751): only the likeliest tokens may be drawn.

The generator then samples from another policy than the softmax: the softmax over the tokens that
were kept. So which ones were kept travels with each episode (`Trajectory.kept`), and the learner's
log-probs are taken among the same ones (keep sampling mask, DeepSeek-V3.2, arXiv 2512.02556).

Axes: B slots · M generated tokens · V tokens of the task's alphabet · K kept tokens, end to end
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = -1e9  # a logit that is left out; not -inf: 0 times it is NaN


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Of each row of logits [B, V] the fewest tokens that have `top_p` of the mass, bool [B, V];
    of two that are equally likely, the one with the lower index comes first."""
    order = logits.argsort(descending=True, stable=True)
    mass = logits.gather(1, order).softmax(-1).cumsum(-1)
    likelier = F.pad(mass, (1, -1))  # the mass before each: first 0
    return torch.empty_like(order, dtype=torch.bool).scatter(1, order, likelier < top_p)


class KeptTokens:
    """Which tokens sampling has kept, for every episode that runs and each token of it."""

    def __init__(self, alphabet: Tensor):
        self.alphabet = alphabet  # int64 [V]
        self.sets = {}  # slot -> arrays of token ids

    def add(self, slots: list, kept: Tensor) -> None:
        """What was kept [B, V] when these slots sampled; only the ids in it leave the device."""
        kept = kept[slots]
        ids = self.alphabet.expand_as(kept)[kept].int().cpu().numpy()
        sets = np.split(ids, kept.sum(1).cumsum(0).tolist())
        for slot, own in zip(slots, sets, strict=False):  # the last one is empty
            self.sets.setdefault(slot, []).append(own)

    def take(self, slot: int) -> dict:
        """The fields of a finished episode."""
        sets = self.sets.pop(slot)
        return {"kept_sizes": np.int32([len(ids) for ids in sets]), "kept": np.concatenate(sets)}


def among_kept(logits: Tensor, start: int, sizes: Tensor, kept: Tensor) -> Tensor:
    """Logits [m, V] of the tokens from `start` on, with NEVER where a token was not kept.

    sizes [M]: from how many tokens each was sampled; kept [K]: which ones, as places in V.
    """
    own = sizes[start : start + len(logits)]
    row = torch.arange(len(own), device=own.device).repeat_interleave(own)  # [k]
    first = sizes[:start].sum()
    inside = kept[first : first + len(row)]
    assert (inside >= 0).all(), "kept tokens must be in the alphabet"
    left_out = torch.ones_like(logits, dtype=torch.bool)
    left_out[row, inside] = False
    return logits.masked_fill(left_out, NEVER)
