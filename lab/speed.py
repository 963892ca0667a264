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
from lab.plots import go_on, save_result, spread
from model import GPT, PRESETS, ModelConfig
from runtime.config import require
from runtime.pictures import column


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


def bench_decode(folder: Path) -> None:
    """Model `small`, 16 slots, on a GPU or one CPU thread: one decoded token a slot at growing
    context, dense against sparse; on a GPU dense by flash decoding, as the generator does, and by
    SDPA."""
    last = 18 if torch.cuda.is_available() else 15
    decoding(folder, [2**i for i in range(12, last)])


def decoding(folder: Path, lengths: list[int], slots: int = 16) -> None:
    """`bench_decode` at these lengths but those that it has measured before."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    result = go_on(folder, f"decode-{device}", {"model": "small", "slots": slots, "rows": []})
    kinds = {"dense": {}}
    if device == "cuda":
        kinds["dense, SDPA"] = {"kernels": "spec"}
    copied = result["bytes_per_s"] = bandwidth(device)
    for size, k in ((64, 16), (64, 8), (16, 16)):
        kinds[f"{k} chunks of {size}"] = {"attention": "dsa", "chunk_size": size, "top_k": k}
    for length in left(lengths, result):
        ways = {}
        for name, how in kinds.items():
            shape = ModelConfig(**PRESETS["small"], context=length, positions="rope", **how)
            model = GPT(shape).on(device, torch.bfloat16 if device == "cuda" else None)
            ways[name] = partial(decode_steps, model, *full_cache(model, slots, length))
        seconds = in_turn(ways | as_graphs(ways), rounds=7)
        row = {"length": length, "tokens_per_s": {}, "over_dense": {}, "of_bound": {}}
        for name, times in seconds.items():
            graph = ", graph" * name.endswith("graph")
            row["tokens_per_s"][name] = spread(np.divide(slots * STEPS, times))
            row["over_dense"][name] = spread(np.divide(seconds[f"dense{graph}"], times))
            how, token = kinds[name.removesuffix(graph)], 2 * model.config.kv_heads
            token *= model.config.layers * model.config.head_width * model.flat.itemsize  # bytes
            size, k = how.get("chunk_size", 1), how.get("top_k", length)
            means = length / size / 2 * ("top_k" in how)  # are read, too
            read = model.flat.nbytes + slots * token * (size * k + means)
            row["of_bound"][name] = spread(STEPS * read / copied / np.array(times))
        result["rows"].append(row)
        tqdm.write(str(row))
        save_result(folder, f"decode-{device}", result)


def left(lengths: list[int], result: dict) -> tqdm:
    """The lengths that a result has no row of, under a bar."""
    known = column(result["rows"], "length")
    return tqdm([length for length in lengths if length not in known], unit="length")


def full_cache(model: GPT, slots: int, context: int) -> tuple:
    """A cache full of random numbers, and the last token and position of every slot."""
    cache = caches.make_cache(model, slots, context)
    for part in (cache.kv, cache.scored, cache.means):
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
WINDOW = 32  # neighbours whose queries have something in common
BACKENDS = {  # of PyTorch, for dense attention
    "cuda": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION),
    "cpu": (SDPBackend.MATH,),
}


def dense_attention(backend: SDPBackend, q, k, v) -> torch.Tensor:
    """Causal attention by one of PyTorch's backends."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def apart(length: int, *shape: int) -> torch.Tensor:
    """Random numbers [length, ...]; float16 in a rehearsal: the interpreter has no bfloat16."""
    if torch.cuda.is_available():
        return torch.randn(length, *shape, device="cuda", dtype=torch.bfloat16)
    return torch.randn(length, *shape).half()


def alike(length: int, *shape: int) -> torch.Tensor:
    """Random numbers, too, but each is a sum of WINDOW, and its neighbours are sums of mostly the
    same, so that they select much the same."""
    total = apart(WINDOW + length, *shape).float().cumsum(0)
    return ((total[WINDOW:] - total[:-WINDOW]) / WINDOW**0.5).to(apart(1).dtype)


def bench_dsa(folder: Path) -> None:
    """Forward, and forward with backward, of the sparse kernels (16 chunks of 64, and GLM-5's 2,048
    tokens; selection included) against dense attention at growing context, on a GPU in bfloat16.
    Queries are random, each by itself, or neighbours are alike."""
    require(torch.cuda.is_available(), "dsa: must be run on a machine with a CUDA device")
    attention(folder, [2**i for i in range(12, 18)])


def attention(folder: Path, lengths: list[int], heads: tuple = HEADS, rounds: int = 3) -> None:
    """`bench_dsa` at these lengths but those that it has measured before."""
    from dsa_triton import dsa_attention, plan_blocks

    def planned(tables, block):
        return tables._replace(blocks=plan_blocks(tables, block))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    query_heads, key_heads, width = heads
    begin = {"heads": heads, "dtype": str(apart(1).dtype).removeprefix("torch."), "rows": []}
    result = go_on(folder, "dsa-cuda", begin)
    for length in left(lengths, result):
        edges = torch.tensor([0, length], device=device)
        tables, single = dsa.packed_tables(edges, 64), dsa.packed_tables(edges, 1)
        k, v = (apart(length, key_heads, width) for _ in "kv")
        ways, row = {}, {"length": length}
        for name, queries, blocks in (("", apart, (1, 8, 16)), (", alike", alike, (1,))):
            q = queries(length, query_heads, width)
            index = queries(length, 4, 64), apart(length, 64), apart(length, 4)
            for block in blocks:
                how = {"tables": planned(tables, block), "top_k": 16, "query_block": block}
                ways[f"sparse, query block {block}{name}"] = (partial(dsa_attention, **how), q)
            how = {"top_k": 16, "tables": planned(tables, 1), "index": index}
            ways[f"sparse, indexer 4 x 64{name}"] = (partial(dsa_attention, **how), q)
            how = {"top_k": 2048, "tables": planned(single, 1), "index": index}
            ways[f"2,048 single tokens, indexer 4 x 64{name}"] = (partial(dsa_attention, **how), q)
        for backend in BACKENDS[device]:
            ways[f"dense {backend.name}"] = (partial(dense_attention, backend), q)
        for kind in ("forward", "forward+backward"):
            runs = {}
            for name, (way, q) in ways.items():
                runs[name] = partial(attend, way, (q, k, v), kind != "forward")
            times = in_turn(runs | as_graphs(runs), rounds)
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
