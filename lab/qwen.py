"""qwen.py: how fast a model of Qwen3's form decodes, with random weights from a folder.

    python bench.py qwen                 # 1M parameters, on a CPU
    python bench.py qwen --size 0.6B     # on one GPU, in bfloat16
    python bench.py folder               # does it learn? 1M parameters, both trainers, adapters

A decode step is measured against the time to read all weights and all keys and values once, at the
speed at which this machine copies memory.
Left out: the published weights, sparse attention (speed.py), and training: a run says itself how
fast its learner is.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

import cache as caches
from lab.plots import save_result
from model import GPT, ModelConfig
from runtime.config import flag
from runtime.devices import describe_machine
from runtime.huggingface import load_weights

SIZES = {  # layers, width, heads, key heads, head width, hidden, vocabulary
    "1M": (4, 128, 4, 2, 32, 384, 2_000),
    "0.6B": (28, 1024, 16, 8, 128, 3072, 151_936),
}
FIELDS = ("layers", "width", "heads", "kv_heads", "head_width", "hidden", "vocab_size")


@dataclass(frozen=True)
class QwenConfig:
    """What is measured."""

    size: str = flag("1M", "of the random model", choices=tuple(SIZES))


def bench_folder(folder: Path) -> None:
    """A random folder that transformers has written learns, and is given back."""
    from folder_run import learning

    learning(folder)


def bench_qwen(folder: Path, config: QwenConfig) -> None:
    """Decode steps of a random model of one size."""
    from folder_run import write_large

    large = torch.cuda.is_available()
    dtype = "bfloat16" if large else "float32"
    torch.set_num_threads(1)
    shape = dict(zip(FIELDS, SIZES[config.size], strict=True))
    path = write_large(folder / "model", shape, dtype)
    how = {"positions": "rope", "qk_norm": True, "context": 4096}
    model = GPT(ModelConfig(**shape, **how), None, getattr(torch, dtype))
    load_weights(model, path)
    model.on("cuda" if large else "cpu")
    result = {"machine": describe_machine(), "size": config.size, "dtype": dtype}
    copied = copy_speed(model)
    result |= {"copied_gb_per_s": copied / 1e9, "decode": [*decode_rows(model, copied)]}
    print(result)
    save_result(folder, "qwen", result)


def seconds_of(way: Callable) -> float:
    """Median seconds of five calls, after one that warms up."""
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        way()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))


def copy_speed(model: GPT) -> float:
    """Bytes a second that this machine reads and writes when it copies."""
    here = torch.empty(1 << 27, device=model.flat.device)
    there = torch.empty_like(here)
    return 2 * here.nbytes / seconds_of(lambda: there.copy_(here))


def decode_rows(model: GPT, copied: float):
    """Milliseconds of a decode step, and which share of the memory bound that is."""
    large = model.flat.is_cuda
    for slots, context in product((16, 64, 256), (512, 4096) if large else (512,)):
        cache = caches.make_cache(model, slots, context)
        caches.reserve(cache, np.full(slots, context))
        tokens = torch.arange(slots, device=model.flat.device)
        inputs = [tokens, torch.full_like(tokens, context - 1)]

        def step(given, cache=cache):
            return model.logits(caches.decode(model, cache, *given))

        way = partial(caches.captured, step, inputs, []) if large else partial(step, inputs)
        with torch.no_grad():
            seconds = seconds_of(way)
        read = model.flat.nbytes + cache.racks[-1].kv[:, :, :slots].nbytes
        share = read / copied / seconds
        yield {"slots": slots, "context": context, "ms": 1e3 * seconds, "of_memory_bound": share}
