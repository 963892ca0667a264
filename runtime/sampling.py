"""sampling.py: which token: noise that is a pure function, and what picks by it.

A hash of (run seed, group, sample, position) gives the one number that picks a token. So an episode
can be sampled again at any time, in any order, beside any others: there is no generator state to
seed, save or share.

Axes: B rows · V tokens that may be sampled
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def mix(x):
    """A 32-bit integer hash of values in [0, 2^32), ints or int64 arrays ("lowbias32", found by
    C. Wellons' hash search). int64 products wrap around, which leaves their low 32 bits right."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & MASK32
    return x ^ (x >> 16)


@lru_cache(1024)
def noise_keys(seed: int, group_id: int, group_size: int) -> list[int]:
    """The 62-bit keys of the sampling noise of a group's trajectories, one for each sample."""
    low, high = 0x9E3779B9, 0x85EBCA6B
    for part in (seed, group_id, group_id >> 32, np.arange(group_size)):
        low = mix((low ^ part) & MASK32)
        high = mix((high + part * 0xC2B2AE35 + low) & MASK32)
    return ((high & 0x3FFFFFFF) << 32 | low).tolist()


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in (0, 1), float32 [B], for each key and position, int64 [B] each. It has 23 bits
    and a half: neither 0 nor 1 can come out."""
    bits = mix((keys & MASK32) ^ mix((keys >> 32) ^ (positions * 0x9E3779B9 & MASK32)))
    return ((bits >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


@torch.no_grad()
def sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample an index per row of logits [B, V] and its log-prob ([B] int64, [B] float32).

    Inverse transform: the first token whose cumulative probability exceeds the row's number in
    `uniform` [B]. Temperature 0 is greedy.
    """
    if temperature == 0:
        chosen, logprobs = logits.argmax(-1), torch.log_softmax(logits, -1)
    else:
        logprobs = torch.log_softmax(logits / temperature, -1)
        cumulative = logprobs.exp().cumsum(-1)
        # the last sum is 1 up to rounding; times it, no number lies beyond the last token
        level = uniform[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, level, right=True)[:, 0]
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]
