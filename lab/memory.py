"""memory.py: what 128k tokens of context take, in bytes: by arithmetic, and as it is allocated.

    python bench.py memory

The arithmetic of a cache is `cache_bytes`. Sparse attention keeps every key and value, too, because
any of them may be selected later, and adds what it scores: so it takes more memory than dense
attention, not less. What takes less is a cache in 8 bits. `LATENT` has the same sum for
DeepSeek-V3.2, whose cache holds one latent vector a token instead of keys and values.
Measured is the cache of one slot, as generation makes it (cache.py), every byte of it written: what
its tensors hold, and by how much the process has grown.
Left out: activations; the shorter rows that a sequence in a dense cache has had on its way to 128k
tokens (together as much again).
"""

import ctypes
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from cache import Cache, make_cache
from fast.eightbit import form_of
from lab.plots import save_result
from lab.qwen import FIELDS, SIZES
from model import GPT, PRESETS, ModelConfig
from runtime.config import DTYPES

TOKENS = 131072
SHAPES = {
    "medium": PRESETS["medium"],
    "Qwen3-0.6B": dict(zip(FIELDS, SIZES["0.6B"], strict=True))
    | {"qk_norm": True, "index_width": 128},
}
KINDS = {
    "dense": {},
    "dsa, 16 of 64 by their means": {"attention": "dsa", "chunk_size": 64, "top_k": 16},
    "dsa, 2048 by an indexer": {
        "attention": "dsa",
        "chunk_size": 1,
        "top_k": 2048,
        "scoring": "indexer",
    },
}
# DeepSeek-V3.2, bytes of a token in a layer: 512 latent numbers, in 8 bits with 4 scales of
# float32, and 64 rotary ones in bfloat16; the indexer's key has 128, in 8 bits with one scale
WIDE, NARROW, INDEX = 2 * (512 + 64), 512 + 4 * 4 + 2 * 64, 128 + 4
LATENT = {
    "dense, bfloat16": WIDE,
    "dsa, bfloat16": WIDE + INDEX,
    "dense, 8 bits": NARROW,
    "dsa, 8 bits": NARROW + INDEX,
}


# ---------------------------------------------------------------------------------- arithmetic


def cache_bytes(c: ModelConfig, tokens: int, precision: str) -> dict[str, int]:
    """Bytes that a sequence takes in a cache of this precision, by what they are for."""
    size = getattr(torch, precision).itemsize
    found = {"keys and values": 2 * c.layers * tokens * c.kv_heads * c.head_width * size}
    if c.attention == "dsa":
        scored = c.kv_heads * c.head_width  # numbers of a token that are scored
        chunks = tokens // c.chunk_size
        if c.indexed:
            scored = c.index_width
            found["index keys"] = c.layers * tokens * scored * size
        if c.chunk_size > 1:
            found["means"] = c.layers * chunks * scored * 4  # float32, whatever the keys are
        found["tables"] = chunks * 8
    return found


def weight_bytes(c: ModelConfig, precision: str) -> int:
    """Bytes of all weights, in 8 bits with their scales."""
    form = form_of(GPT(replace(c, context=16), None), precision)
    return form.size * form.dtype.itemsize


# ---------------------------------------------------------------------------------- measurement


def resident() -> int:
    """Bytes of this process that are in memory, without what was freed (glibc would keep that)."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def tensors_of(cache: Cache) -> list[torch.Tensor]:
    """Everything that grows with the context."""
    parts = [cache.kv, cache.scored, cache.means, *(cache.tables or ())]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def written_cache(c: ModelConfig, tokens: int, precision: str) -> Cache:
    """The cache of one slot with so many tokens, every byte of it written: there is no memory
    behind zeros that nobody has written."""
    flat = torch.zeros(1, dtype=getattr(torch, precision))  # no weight is read
    cache = make_cache(SimpleNamespace(config=c, flat=flat), slots=1, capacity=tokens)
    for part in tensors_of(cache):
        part.fill_(1)
    return cache


def measured_bytes(c: ModelConfig, tokens: int, precision: str) -> tuple[int, int]:
    """Of a full cache: bytes that its tensors hold, and by how many this process has grown."""
    written_cache(c, 1024, precision)  # libraries grow at their first call
    before = resident()
    cache = written_cache(c, tokens, precision)
    grown = resident() - before
    storages = [part.untyped_storage() for part in tensors_of(cache)]
    own = {storage.data_ptr(): storage.nbytes() for storage in storages}  # some have the same
    return sum(own.values()), grown


def bench_memory(folder: Path) -> None:
    """Every shape, kind of attention and precision; of Qwen3-0.6B one layer is measured."""
    result = {"tokens": TOKENS, "latent": LATENT, "weights": {}, "rows": []}
    for (name, shape), (kind, how) in product(SHAPES.items(), KINDS.items()):
        c = ModelConfig(**shape, **how, positions="rope", context=TOKENS)
        for precision in DTYPES:
            parts = cache_bytes(c, TOKENS, precision)
            part = replace(c, layers=1) if name not in PRESETS else c
            computed = sum(cache_bytes(part, TOKENS, precision).values())
            tensors, grown = measured_bytes(part, TOKENS, precision)
            row = {"shape": name, "kind": kind, "precision": precision}
            row |= {"bytes": sum(parts.values()), "layers": part.layers, "computed": computed}
            result["rows"].append(row | {"tensors": tensors, "resident": grown, "parts": parts})
            if kind == "dense":
                own = result["weights"].setdefault(name, {})
                own[precision] = weight_bytes(c, precision)
            save_result(folder, "memory", result)
