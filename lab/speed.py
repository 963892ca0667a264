"""speed.py: how fast the parts are: decoding, sparse attention, a model of Qwen3's form.

    python bench.py decode               # at long context, dense against sparse
    python bench.py dsa                  # attention kernels, on a GPU
    python bench.py gpu --part model     # a model of random weights

Ways of doing the same thing are compared in one run, in turn (A B A B), with medians and extremes;
the first round of each only warms up. On a GPU a way is timed twice: as one eager call, and as a
replayed CUDA graph ("NAME, graph"), in which compiling, plans and the launching of kernels are not
counted. A decode step is measured against the time to read all weights, all keys and values that
are attended to, and the means of all chunks once, at the speed at which this machine copies memory;
the learner against a large matrix product of the same precision, with 6 operations a parameter and
token.
Left out: training runs (races.py, campaigns.py), published weights.
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
from lab.plots import column, go_on, save_result, spread
from logprobs import generated_logprobs
from model import GPT, PRESETS, ModelConfig, pack_tokens
from runtime.config import require
from runtime.huggingface import load_weights

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def seconds_of(way: Callable) -> float:
    """Seconds of a call, from an idle GPU until it is done."""
    wait = torch.cuda.synchronize if CUDA else int
    wait()
    begin = time.perf_counter()
    way()
    wait()
    return time.perf_counter() - begin


def in_turn(ways: dict[str, Callable], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every way in every round, without the first round, which warms up."""
    times = [{name: seconds_of(way) for name, way in ways.items()} for _ in range(rounds + 1)]
    return {name: np.array(column(times[1:], name)) for name in ways}


def as_graphs(ways: dict[str, Callable]) -> dict[str, Callable]:
    """The same calls as CUDA graphs, which are replayed; none without a GPU."""
    graphs = {}
    for name, way in ways.items() if CUDA else ():
        way()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            way()
        graphs[f"{name}, graph"] = graph.replay
    return graphs


def bandwidth() -> float:
    """Bytes a second that a copy of 512 MiB (on a GPU 4 GiB) reads and writes, the best of 9."""
    source = torch.ones(1 << (32 if CUDA else 29), dtype=torch.uint8, device=DEVICE)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / min(in_turn({"": partial(copy.copy_, source)}, rounds=9)[""])


def left(lengths: list[int], result: dict) -> tqdm:
    """The lengths that a result has no row of, under a bar."""
    known = column(result["rows"], "length")
    return tqdm([length for length in lengths if length not in known], unit="length")


# ---------------------------------------------------------------------------------- decoding

STEPS = 5  # decode steps that are timed together
LAYERS = "two layers of Qwen3-0.6B" if CUDA else "small"  # a GPU needs more to read
QWEN = dict(layers=2, width=1024, heads=16, kv_heads=8, head_width=128, hidden=3072)
ATTENTIONS = {"dense": {}}
for size, k in ((64, 16), (64, 8), (16, 16)):
    ATTENTIONS[f"{k} chunks of {size}"] = {"attention": "dsa", "chunk_size": size, "top_k": k}


def bench_decode(folder: Path) -> None:
    """Model `small` on one CPU thread, larger layers on a GPU: one decoded token in 16 slots at
    growing context, dense (on a GPU by flash decoding, as the generator does) against sparse."""
    decoding(folder, [2**i for i in range(12, 18 if CUDA else 15)])


def decoding(folder: Path, lengths: list[int], slots: int = 16) -> None:
    """`bench_decode` at these lengths but those that it has measured before."""
    torch.set_num_threads(1)
    file, begin = f"decode-{DEVICE}", {"model": LAYERS, "slots": slots, "rows": []}
    result = go_on(folder, file, begin)
    copied = result["bytes_per_s"] = bandwidth()
    for length in left(lengths, result):
        ways, read = {}, {}
        for name, how in ATTENTIONS.items():
            preset = PRESETS.get(LAYERS, QWEN)
            shape = ModelConfig(**preset, context=length, positions="rope", **how)
            model = GPT(shape).on(DEVICE, torch.bfloat16 if CUDA else None)
            ways[name], cache = decode_step(model, slots, length, STEPS)
            attended = how.get("top_k", length) * how.get("chunk_size", 1) / length
            means = 0 if cache.means is None else cache.means.nbytes
            read[name] = STEPS * (model.flat.nbytes + min(1.0, attended) * cache.kv.nbytes + means)
        times = in_turn(ways | as_graphs(ways), rounds=7)
        for name, seconds in times.items():
            way = name.removesuffix(", graph")
            dense = times[name.replace(way, "dense")]  # a graph is compared with a graph
            row = {"length": length, "way": name, "tokens/s": spread(slots * STEPS / seconds)}
            row["over dense"] = spread(dense / seconds)
            row["of what memory allows"] = spread(read[way] / copied / seconds)
            result["rows"].append(row)
        save_result(folder, file, result)


def decode_step(model: GPT, slots: int, context: int, steps: int = 1) -> tuple:
    """A call that does a few times the same decode step, with logits, on a cache full of random
    numbers; and that cache."""
    cache = caches.make_cache(model, slots, context)
    for part in (cache.kv, cache.scored, cache.means):
        if part is not None:
            part.normal_()
    tokens = torch.arange(slots, device=model.flat.device)
    inputs = tokens, torch.full_like(tokens, context - 1)

    @torch.no_grad()
    def step():
        for _ in range(steps):
            model.logits(caches.decode(model, cache, *inputs))

    return step, cache


# ---------------------------------------------------------------------------- sparse attention

HEADS = (32, 2, 128)  # query heads, key heads, head width
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if CUDA else (SDPBackend.MATH,)


def dense_attention(backend: SDPBackend, q, k, v) -> torch.Tensor:
    """Causal attention by one of PyTorch's backends."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def apart(length: int, *shape: int) -> torch.Tensor:
    """Random numbers [length, ...]; float16 in a rehearsal: the interpreter has no bfloat16."""
    return torch.randn(length, *shape, device=DEVICE).to(torch.bfloat16 if CUDA else torch.half)


def bench_dsa(folder: Path) -> None:
    """Forward, and forward with backward, of the sparse kernels (16 chunks of 64, and GLM-5's 2,048
    tokens; selection included) against dense attention at growing context, on a GPU in bfloat16."""
    require(CUDA, "dsa: must be run on a machine with a CUDA device")
    attention(folder, [2**i for i in range(12, 18)])


def attention(folder: Path, lengths: list[int], heads: tuple = HEADS, rounds: int = 3) -> None:
    """`bench_dsa` at these lengths but those that it has measured before. "over": how many times as
    fast as dense attention by that backend; a graph is compared with a graph."""
    begin = {"heads": heads, "dtype": str(apart(1).dtype).removeprefix("torch."), "rows": []}
    result = go_on(folder, "dsa-cuda", begin)
    for length in left(lengths, result):
        q, k, v = (apart(length, n, heads[2]) for n in (heads[0], heads[1], heads[1]))
        ways = sparse_ways(length)
        for backend in BACKENDS:
            ways[backend.name] = partial(dense_attention, backend)
        for part in ("forward", "forward+backward"):
            runs = {}
            for name, way in ways.items():
                runs[name] = partial(attend, way, (q, k, v), part != "forward")
            times = in_turn(runs | as_graphs(runs), rounds)
            for name, seconds in times.items():
                row = {"length": length, "way": f"{part}, {name}", "ms": spread(1e3 * seconds)}
                for backend in BACKENDS:
                    dense = times[backend.name + ", graph" * name.endswith(", graph")]
                    row[f"over {backend.name}"] = float(np.median(dense) / np.median(seconds))
                result["rows"].append(row)
        save_result(folder, "dsa-cuda", result)


def sparse_ways(length: int) -> dict[str, Callable]:
    """{name: attention of q, k and v} of the sparse kernels."""
    from dsa_triton import dsa_attention, plan_blocks

    edges = torch.tensor([0, length], device=DEVICE)
    index = apart(length, 4, 64), apart(length, 64), apart(length, 4)
    cases = {f"query block {block}": (64, 16, block, None) for block in (1, 8, 16)}
    cases["indexer 4 x 64"] = (64, 16, 1, index)
    cases["2,048 single tokens, indexer 4 x 64"] = (1, 2048, 1, index)
    ways = {}
    for name, (chunk_size, top_k, block, scored) in cases.items():
        tables = dsa.packed_tables(edges, chunk_size)
        tables = tables._replace(blocks=plan_blocks(tables, block))
        how = {"tables": tables, "top_k": top_k, "query_block": block, "index": scored}
        ways[name] = partial(dsa_attention, **how)
    return ways


def attend(way: Callable, tensors: tuple, backward: bool) -> None:
    """One call, with or without its gradients."""
    inputs = [x.detach().requires_grad_(backward) for x in tensors]
    out = way(*inputs)
    if backward:
        torch.autograd.grad(out, inputs, torch.ones_like(out))


# --------------------------------------------------------------------- a model of Qwen3's form

FIELDS = ("layers", "width", "heads", "kv_heads", "head_width", "hidden", "vocab_size")
SIZES = {"1M": (4, 128, 4, 2, 32, 384, 2_000), "0.6B": (28, 1024, 16, 8, 128, 3072, 151_936)}
PEAK = 989e12  # operations a second in bfloat16, dense, of H100 and H200 SXM (NVIDIA's data sheets)
DTYPE = "bfloat16" if CUDA else "float32"


def random_model(folder: Path, size: str) -> Path:
    """The folder of a random model of Qwen3's form, which is written once."""
    from folder_run import write_large

    path = folder / "model"
    if not (path / "generation_config.json").exists():  # is written last
        write_large(path, dict(zip(FIELDS, SIZES[size], strict=True)), DTYPE)
    return path


def measure_model(folder: Path, size: str, cases: list[tuple]) -> None:
    """Decode steps of (slots, context), and the learner; what was measured before is left out."""
    result = go_on(folder, "qwen", {"size": size, "dtype": DTYPE, "rows": []})
    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training (devices.py)
    how = {"positions": "rope", "qk_norm": True, "context": 4096}
    shape = ModelConfig(**dict(zip(FIELDS, SIZES[size], strict=True)), **how)
    model = GPT(shape, None, getattr(torch, DTYPE))
    load_weights(model, random_model(folder, size))
    model.on(DEVICE)
    copied, known = bandwidth(), column(result["rows"], "what")
    for slots, context in cases:
        what = f"decode, {slots} slots, {context} tokens"
        if what not in known:
            step, cache = decode_step(model, slots, context)
            seconds = median_of(as_graphs({"": step}).get(", graph", step))
            row = {"what": what, "ms": 1e3 * seconds, "tokens/s": slots / seconds}
            row["of what memory allows"] = (model.flat.nbytes + cache.kv.nbytes) / copied / seconds
            result["rows"].append(row)
            save_result(folder, "qwen", result)
    if "learner" not in known:
        side = 8192 if CUDA else 1024
        matrix = torch.randn_like(model.flat.new_empty(side, side))
        product = 2 * side**3 / median_of(lambda: matrix @ matrix)
        speed = learner_speed(model)
        used = 6 * len(model.flat) * speed
        row = {"what": "learner", "tokens/s": speed, "of a matrix product": used / product}
        result["rows"].append(row | ({"MFU": used / PEAK} if CUDA else {}))
        save_result(folder, "qwen", result)


def median_of(way: Callable) -> float:
    """Median seconds of a call, after one that warms up."""
    return float(np.median(in_turn({"": way}, rounds=5)[""]))


def learner_speed(model: GPT) -> float:
    """Tokens a second, forward and backward, of 8 packed sequences (16k tokens on a GPU)."""
    length, words = 2048 if CUDA else 64, model.config.vocab_size
    tokens = np.random.default_rng(0).integers(words, size=(8, length))
    packed = pack_tokens(list(tokens), model.flat.device)
    rows = (packed.positions > 0).nonzero()[:, 0]
    alphabet = torch.arange(words, device=rows.device)

    def learn():
        model.flat_grad.zero_()
        logprobs, *_ = generated_logprobs(model, packed, rows, alphabet, 1.0)
        logprobs.mean().backward()

    return tokens.size / median_of(learn)
