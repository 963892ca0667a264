"""speed.py: how fast the parts are: decoding at long context, sparse attention.

`python bench.py decode` and `dsa` run these. Ways of doing the same thing are compared
in one run, in turn (A B A B), with medians and extremes; the first round of each only warms up.
Left out: training runs (races.py, campaigns.py), models of Qwen3's form (qwen.py).
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import cache as caches
import dsa
from lab.plots import column, save_result, spread
from model import GPT, PRESETS, ModelConfig
from runtime.config import UserError
from runtime.devices import describe_machine


def seconds_of(way: Callable) -> float:
    """Seconds of a call, from an idle GPU until it is done."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    wait()
    begin = time.perf_counter()
    way()
    wait()
    return time.perf_counter() - begin


def in_turn(ways: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, without the first round, which warms up."""
    found = [{name: seconds_of(way) for name, way in ways.items()} for _ in range(rounds + 1)]
    return {name: column(found[1:], name) for name in ways}


# --------------------------------------------------------------------------- decoding, long context

STEPS = 5  # decode steps that are timed together


def bench_decode(folder: Path, slots: int = 16, rounds: int = 7) -> None:
    """Model `small`, on a GPU or one CPU thread: one decoded token a slot at growing context, dense
    against sparse."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    result = {"machine": describe_machine(), "model": "small", "slots": slots, "rows": []}
    kinds = {"dense": {}}
    for size, k in ((64, 16), (64, 8), (16, 16)):
        kinds[f"{k} chunks of {size}"] = {"attention": "dsa", "chunk_size": size, "top_k": k}
    for length in tqdm([2**i for i in range(12, 18 if device == "cuda" else 15)], unit="length"):
        ways = {}
        for name, how in kinds.items():
            shape = ModelConfig(**PRESETS["small"], context=length, positions="rope", **how)
            model = GPT(shape).on(device)
            ways[name] = partial(decode_steps, model, *full_cache(model, slots, length))
        seconds = in_turn(ways, rounds)
        row = {"length": length, "tokens_per_s": {}, "over_dense": {}}
        for name, times in seconds.items():
            row["tokens_per_s"][name] = spread(np.divide(slots * STEPS, times))
            row["over_dense"][name] = spread(np.divide(seconds["dense"], times))
        result["rows"].append(row)
        tqdm.write(str(row))
        save_result(folder, f"decode-{device}", result)


def full_cache(model: GPT, slots: int, context: int) -> tuple:
    """A cache full of random numbers, and the last token and position of every slot."""
    cache = caches.make_cache(model, slots, context)
    caches.reserve(cache, np.full(slots, context))
    for part in (cache.racks[-1].kv, cache.scored, cache.means):
        if part is not None:
            part.normal_()
    tokens = torch.arange(slots, device=model.flat.device)
    return cache, tokens, torch.full_like(tokens, context - 1)


def decode_steps(model: GPT, cache: caches.Cache, tokens, positions) -> None:
    """A few times the same decode step."""
    for _ in range(STEPS):
        caches.decode(model, cache, tokens, positions)


# --------------------------------------------------------------------------------- sparse attention

HEADS = (32, 2, 128)  # query heads, key heads, head width
GPU = {"device": "cuda", "dtype": torch.bfloat16}
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def dense_attention(backend: SDPBackend, q, k, v) -> torch.Tensor:
    """Causal attention by one of PyTorch's backends."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def bench_dsa(folder: Path, rounds: int = 3) -> None:
    """Forward, and forward with backward, of the sparse kernels (16 chunks of 64, selection
    included) against dense attention at growing context, on a GPU in bfloat16."""
    if not torch.cuda.is_available():
        raise UserError("dsa: must be run on a machine with a CUDA device")
    from dsa_triton import dsa_attention

    query_heads, key_heads, width = HEADS
    result = {"machine": describe_machine(), "heads": HEADS, "dtype": "bfloat16", "rows": []}
    for length in tqdm([2**i for i in range(12, 18)], unit="length"):
        tensors = []
        for heads in (query_heads, key_heads, key_heads):
            tensors.append(torch.randn(length, heads, width, **GPU))
        tables = dsa.packed_tables(torch.tensor([0, length], device="cuda"), 64)
        ways = {f"dense {backend.name}": partial(dense_attention, backend) for backend in BACKENDS}
        for block in (1, 8, 16):
            how = {"tables": tables, "top_k": 16, "query_block": block}
            ways[f"sparse, query block {block}"] = partial(dsa_attention, **how)
        row = {"length": length}
        for kind in ("forward", "forward+backward"):
            runs = {}
            for name, way in ways.items():
                runs[name] = partial(attend, way, tensors, kind != "forward")
            times = in_turn(runs, rounds)
            row[kind] = {name: {"ms": spread(1e3 * np.array(times[name]))} for name in ways}
        result["rows"].append(row)
        tqdm.write(str(row))
        save_result(folder, "dsa-cuda", result)


def attend(way: Callable, tensors: list, backward: bool) -> None:
    """One call, with or without its gradients."""
    inputs = [x.detach().requires_grad_(backward) for x in tensors]
    out = way(*inputs)
    if backward:
        torch.autograd.grad(out, inputs, torch.ones_like(out))
