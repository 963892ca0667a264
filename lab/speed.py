"""speed.py: how fast the parts are: decoding at long context, sparse attention.

`python bench.py decode` and `dsa` run these. Ways of doing the same thing are compared
in one run, in turn (A B A B), with medians and extremes; the first round of each only warms up.
On a GPU a way is timed twice: as one eager call, and as a replayed CUDA graph ("NAME, graph"), in
which compiling, plans and the launching of kernels are not counted.
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
from lab.unions import union
from model import GPT, PRESETS, ModelConfig
from runtime.config import UserError


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


def as_graphs(ways: dict[str, Callable]) -> dict[str, Callable]:
    """The same calls as CUDA graphs, which are replayed; none without a GPU."""
    found = {}
    for name, way in ways.items() if torch.cuda.is_available() else ():
        way()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            way()
        found[f"{name}, graph"] = graph.replay
    return found


def bandwidth(device: torch.device | str) -> float:
    """Bytes a second that a copy of 512 MiB reads and writes, the best of 9."""
    source = torch.ones(1 << 29, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds_of(partial(copy.copy_, source)) for _ in range(9))


# --------------------------------------------------------------------------- decoding, long context

STEPS = 5  # decode steps that are timed together


def bench_decode(folder: Path, slots: int = 16) -> None:
    """Model `small`, on a GPU or one CPU thread: one decoded token a slot at growing context, dense
    against sparse; on a GPU dense by flash decoding, as the generator does, and by SDPA."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    result = {"model": "small", "slots": slots, "rows": []}
    kinds = {"dense": {}}
    if device == "cuda":
        kinds["dense, SDPA"] = {"kernels": "spec"}
        result["bytes_per_s"] = bandwidth(device)
    for size, k in ((64, 16), (64, 8), (16, 16)):
        kinds[f"{k} chunks of {size}"] = {"attention": "dsa", "chunk_size": size, "top_k": k}
    for length in tqdm([2**i for i in range(12, 18 if device == "cuda" else 15)], unit="length"):
        ways = {}
        for name, how in kinds.items():
            shape = ModelConfig(**PRESETS["small"], context=length, positions="rope", **how)
            model = GPT(shape).on(device, torch.bfloat16 if device == "cuda" else None)
            ways[name] = partial(decode_steps, model, *full_cache(model, slots, length))
        seconds = in_turn(ways | as_graphs(ways), rounds=7)
        row = {"length": length, "tokens_per_s": {}, "over_dense": {}}
        for name, times in seconds.items():
            dense = seconds["dense, graph" if name.endswith("graph") else "dense"]
            row["tokens_per_s"][name] = spread(np.divide(slots * STEPS, times))
            row["over_dense"][name] = spread(np.divide(dense, times))
        if device == "cuda":  # the time that reading weights, keys and values takes, over the time
            kv = ways["dense"].args[1].racks[-1].kv[:, :, 0].nbytes  # of one slot
            fastest = STEPS * (model.flat.nbytes + slots * kv) / result["bytes_per_s"]
            row["memory_bound"] = spread(np.divide(fastest, seconds["dense, graph"]))
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
WINDOW = 32  # neighbours whose queries have something in common
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def dense_attention(backend: SDPBackend, q, k, v) -> torch.Tensor:
    """Causal attention by one of PyTorch's backends."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def apart(length: int, *shape: int) -> torch.Tensor:
    """Random numbers [length, ...]."""
    return torch.randn(length, *shape, **GPU)


def alike(length: int, *shape: int) -> torch.Tensor:
    """Random numbers, too, but each is a sum of WINDOW, and its neighbours are sums of mostly the
    same, so that they select much the same: how much, "union of 8" records (unions.py: 1.8)."""
    total = apart(WINDOW + length, *shape).float().cumsum(0)
    return ((total[WINDOW:] - total[:-WINDOW]) / WINDOW**0.5).bfloat16()


def bench_dsa(folder: Path) -> None:
    """Forward, and forward with backward, of the sparse kernels (16 chunks of 64, and GLM-5's 2,048
    tokens; selection included) against dense attention at growing context, on a GPU in bfloat16.
    Queries are random, each by itself, or neighbours are alike."""
    if not torch.cuda.is_available():
        raise UserError("dsa: must be run on a machine with a CUDA device")
    from dsa_triton import dsa_attention, plan_blocks, select_chunks

    def planned(tables, block):
        return tables._replace(blocks=plan_blocks(tables, block))

    query_heads, key_heads, width = HEADS
    result = {"heads": HEADS, "dtype": "bfloat16", "rows": []}
    for length in tqdm([2**i for i in range(12, 18)], unit="length"):
        edges = torch.tensor([0, length], device="cuda")
        tables, single = dsa.packed_tables(edges, 64), dsa.packed_tables(edges, 1)
        k, v = (apart(length, key_heads, width) for _ in "kv")
        ways, row = {}, {"length": length, "union of 8": {}}
        for name, queries, blocks in (("", apart, (1, 8, 16)), (", alike", alike, (1,))):
            q, q_index = queries(length, query_heads, width), queries(length, 4, 64)
            for block in blocks:
                how = {"tables": planned(tables, block), "top_k": 16, "query_block": block}
                ways[f"sparse, query block {block}{name}"] = (partial(dsa_attention, **how), q)
            how = {"tables": planned(single, 1), "top_k": 2048}
            how |= {"index": (q_index, apart(length, 64), apart(length, 4))}
            ways[f"2,048 single tokens, indexer 4 x 64{name}"] = (partial(dsa_attention, **how), q)
            lists = select_chunks(q, k, tables, 16)
            row["union of 8"][queries.__name__] = union(lists, 8)
        for backend in BACKENDS:
            ways[f"dense {backend.name}"] = (partial(dense_attention, backend), q)
        for kind in ("forward", "forward+backward"):
            runs = {}
            for name, (way, q) in ways.items():
                runs[name] = partial(attend, way, (q, k, v), kind != "forward")
            times = in_turn(runs | as_graphs(runs), rounds=3)
            row[kind] = {name: {"ms": spread(1e3 * np.array(each))} for name, each in times.items()}
        result["rows"].append(row)
        tqdm.write(str(row))
        save_result(folder, "dsa-cuda", result)


def attend(way: Callable, tensors: list, backward: bool) -> None:
    """One call, with or without its gradients."""
    inputs = [x.detach().requires_grad_(backward) for x in tensors]
    out = way(*inputs)
    if backward:
        torch.autograd.grad(out, inputs, torch.ones_like(out))
