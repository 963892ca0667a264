"""noise.py: the randomness of sampling: a hash of (run seed, group, sample, position).

There is no state to seed, save or share: see rollout.py.
"""

from functools import lru_cache

import numpy as np


def mix(x):
    """A 32-bit integer hash of values in [0, 2^32), ints or int64 arrays ("lowbias32", found by
    C. Wellons' hash search). int64 products wrap around, which leaves their low 32 bits right."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


@lru_cache(1024)
def noise_keys(seed: int, group_id: int, group_size: int) -> list:
    """The 62-bit keys of the sampling noise of a group's trajectories, one for each sample.

    Two lanes of 32 bits, ours: each part goes through `mix` in both, and the second hears the
    first. The constants are odd numbers without a pattern; tests check what comes out.
    """
    low = 0x9E3779B9
    high = 0x85EBCA6B
    for part in (seed, group_id, group_id >> 32, np.arange(group_size)):
        low = mix((low ^ part) & 0xFFFFFFFF)
        high = mix((high + part * 0xC2B2AE35 + low) & 0xFFFFFFFF)
    return ((high & 0x3FFFFFFF) << 32 | low).tolist()


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in (0, 1), float32 [B], for each key and position, int64 [B] each. It has 23 bits
    and a half: neither 0 nor 1 can come out."""
    bits = mix((keys & 0xFFFFFFFF) ^ mix((keys >> 32) ^ (positions * 0x9E3779B9 & 0xFFFFFFFF)))
    return ((bits >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
