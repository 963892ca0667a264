"""speed.py: how fast the parts are: the generator, decoding at long context, sparse attention.

`python bench.py generator`, `decode` and `dsa` run these. Compared are ways of doing the same thing
in one run, A B A B, with medians and extremes; times of a GPU wait for the GPU.
Left out: training runs (bench.py).
"""

import json
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.plots import RESULTS, load_result, save_result, spread
from runtime.config import Config, fail
from runtime.devices import describe_machine


def our_speed(model, prompts: list[list[int]], lengths: list[int], slots: int) -> float:
    """Useful tokens per second of this project's generator; lengths are forced, tokens sampled."""
    from buffer import Group
    from rollout import Environment, Generator, generate

    environment = Environment(
        encode_prompt=lambda problem: problem["tokens"],
        respond=None,  # never asked: an episode is one turn
        alphabet=np.arange(model.config.vocab_size),
        stop=frozenset(),
        turn_tokens=model.config.context,
        max_turns=1,
    )
    generator = Generator(model, environment, slots, model.config.context, 1)
    pairs = enumerate(zip(prompts, lengths, strict=True))
    groups = [Group(i, 0, {"tokens": p, "turn_tokens": n}) for i, (p, n) in pairs]
    start = time.perf_counter()
    episodes = generate(generator, groups)
    seconds = time.perf_counter() - start
    assert [int(g.trajectories[0].loss_mask.sum()) for g in episodes] == lengths
    return sum(lengths) / seconds


def their_speed(model, prompts: list[list[int]], lengths: list[int], slots: int) -> float:
    """Useful tokens per second of transformers' `generate`: batches of `slots` rows, padded on the
    left, each of which runs until its longest answer is done (as `generate` does with an end
    token); tokens behind a row's own end do not count."""
    import torch

    start = time.perf_counter()
    for i in range(0, len(prompts), slots):
        rows, longest = prompts[i : i + slots], max(lengths[i : i + slots])
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        options = {"do_sample": True, "min_new_tokens": longest, "max_new_tokens": longest}
        out = model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        assert out.shape[1] == width + longest
    return sum(lengths) / (time.perf_counter() - start)


def bench_generator(rounds: int = 5, slots: int = 64) -> None:
    """Decode speed on one CPU thread, model `small`: this generator beside transformers' `generate`
    for a Qwen3 configuration of the same shape, A B A B in one run -> results/generator.json."""
    import torch

    import reward
    from model import GPT, PRESETS, ModelConfig

    torch.set_num_threads(1)
    try:
        import transformers
    except ImportError:
        fail(ValueError("generator: needs the package transformers (pip install it)"))
    shape = ModelConfig(
        **PRESETS["small"], context=512, positions="rope", qk_norm=True, init_std=0.02
    )
    ours = GPT(shape)
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.width,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_width,
            max_position_embeddings=shape.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    same_size = ours.flat.numel() == sum(p.numel() for p in theirs.parameters())
    assert same_size, "the two models differ in size"

    task = reward.make_task("sum")
    problems = [task.reset(i, "train") for i in range(16 * slots)]
    workloads = {
        "equal lengths": ([list(range(16))] * slots, [128] * slots),
        "sum, real lengths": (
            [reward.encode(p["prompt"]) for p in problems],
            [len(p["answer"]) + 1 for p in problems],
        ),
    }
    result = {"machine": describe_machine(), "transformers": transformers.__version__}
    result |= {"parameters": ours.flat.numel(), "slots": slots, "workloads": {}}
    for name, (prompts, lengths) in workloads.items():
        speeds: dict[str, list[float]] = {"nanoglm": [], "transformers": []}
        our_speed(ours, prompts[:slots], lengths[:slots], slots)  # warm up
        their_speed(theirs, prompts[:8], [4] * 8, slots)
        for _ in range(rounds):
            speeds["nanoglm"].append(our_speed(ours, prompts, lengths, slots))
            speeds["transformers"].append(their_speed(theirs, prompts, lengths, slots))
        ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
        result["workloads"][name] = {
            "tokens": sum(lengths),
            "longest": max(lengths),
            "tokens_per_s": {who: spread(values) for who, values in speeds.items()},
            "ratio": spread(ratios),
        }
        print(f"{name}: {json.dumps(result['workloads'][name])}", flush=True)
    save_result("generator", result)


def bench_compile(rounds: int = 9, batch: int = 16) -> None:
    """Generation with and without `--compile decode` on one CPU thread, in turn: whole batches at
    random weights, the same prompts; and seconds to start (torch keeps what it has compiled on
    disk) -> results/compile.json."""
    import torch

    from buffer import Group
    from learner import make_generator, make_model, make_task
    from rollout import generate

    torch.set_num_threads(1)
    result = {"machine": describe_machine(), "slots": 16 * batch, "tasks": {}}
    for name in ("guess", "reverse", "sum"):
        by, seconds, speeds = {}, {}, {"no": [], "decode": []}
        for how in speeds:
            config = Config(task=name, compile=how, slots=16 * batch)
            task, start = make_task(config), time.perf_counter()
            by[how] = make_generator(config, task, make_model(config, task))
            seconds[how] = time.perf_counter() - start
        for i, how in product(range(rounds + 1), by):  # the first round warms up
            ids, start = range(i * batch, (i + 1) * batch), time.perf_counter()
            done = generate(by[how], [Group(j, 0, task.reset(j, "train")) for j in ids])
            tokens = sum(t.generated for group in done for t in group.trajectories)
            speeds[how].append(tokens / (time.perf_counter() - start))
        plain, compiled = (values[1:] for values in speeds.values())
        ratio = spread([new / old for old, new in zip(plain, compiled, strict=True)])
        row = {"tokens_per_s": {"plain": spread(plain), "compiled": spread(compiled)}}
        result["tasks"][name] = row | {"ratio": ratio, "compile_s": round(seconds["decode"], 1)}
        print(f"{name}: {json.dumps(result['tasks'][name])}", flush=True)
    save_result("compile", result)


def bench_decode(slots: int = 16, rounds: int = 7) -> None:
    """Model `small`, on a GPU or one CPU thread: one decoded token a slot at growing context, dense
    against sparse in turn; and peak memory of a sparse prefill on CPU -> results/decode-*.json."""
    import torch

    import cache as room
    from model import GPT, PRESETS, ModelConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = [2**i for i in (range(12, 18) if device == "cuda" else range(12, 15))]
    torch.set_num_threads(1)
    result = {"machine": describe_machine(), "model": "small", "slots": slots, "rows": []}
    kinds = {"dense": {}}
    for chunk_size, top_k in ((64, 16), (64, 8), (16, 16)):
        sparse = {"attention": "dsa", "chunk_size": chunk_size, "top_k": top_k}
        kinds[f"{top_k} chunks of {chunk_size}"] = sparse
    tokens = torch.arange(slots, device=device)
    for length in tqdm(lengths, unit="length"):
        steps, positions = {}, torch.full_like(tokens, length - 1)
        for name, how in kinds.items():
            shape = ModelConfig(**PRESETS["small"], context=length, positions="rope", **how)
            model = GPT(shape).on(device)
            cache = room.make_cache(model, slots, length)
            for part in (x for x in cache[:4] if x is not None):
                part.normal_()
            steps[name] = partial(room.decode, model, cache, tokens, positions, length - 1)
        times = {name: [] for name in steps}
        for i in range(rounds + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                for _ in range(5):
                    hidden = step()
                hidden.cpu()  # waits for a GPU
                times[name] += [(time.perf_counter() - start) / 5] * (i > 0)  # the first warms up
        row = {"length": length, "tokens_per_s": {}, "over_dense": {}}
        for name, seconds in times.items():
            row["tokens_per_s"][name] = spread([slots / s for s in seconds])
            pairs = zip(times["dense"], seconds, strict=True)
            row["over_dense"][name] = spread([dense / s for dense, s in pairs])
        row["prefill_peak_mib"] = prefill_peak(length) if device == "cpu" else None
        result["rows"].append(row)
        tqdm.write(json.dumps(row))
        save_result(f"decode-{device}", result)


def prefill_peak(length: int) -> float:
    """MiB that a sparse prefill of one sequence adds to a fresh process at its peak."""
    code = rf"""
import re, torch
from pathlib import Path
from cache import make_cache, prefill
from model import GPT, PRESETS, ModelConfig
torch.set_num_threads(1)
read = lambda key: int(re.search(key + r":\s+(\d+)", status.read_text())[1]) / 1024
status = Path("/proc/self/status")
sparse = dict(attention="dsa", chunk_size=64, top_k=16, positions="rope")
model = GPT(ModelConfig(**PRESETS["small"], context={length}, **sparse))
cache = make_cache(model, 1, {length})
prefill(model, cache, torch.tensor([0]), [[1] * 64])
Path("/proc/self/clear_refs").write_text("5")  # forget the highest memory so far (Linux)
before = read("VmRSS")
prefill(model, cache, torch.tensor([0]), [[i % 500 for i in range({length})]])
print(read("VmHWM") - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        text=True,
        capture_output=True,
        check=True,
    )
    return round(float(done.stdout), 1)


DSA_SHAPES = {
    "cuda": dict(
        heads=(32, 2, 128),  # query heads, key heads, head width
        dtype="bfloat16",
        lengths=[2**i for i in range(12, 18)],
        dense=("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"),
        query_blocks=(1, 8, 16),
    ),
    "cpu": dict(
        heads=(4, 1, 32),
        dtype="float32",
        lengths=[2**i for i in range(11, 16)],
        dense=("FLASH_ATTENTION",),
        query_blocks=(1,),
    ),
}


def bench_dsa(rounds: int = 3) -> None:
    """Forward, and forward with backward, of sparse attention (16 chunks of 64) against dense at
    growing context: the kernels on a GPU, beside every dense SDPA backend that runs there; the
    specification on a CPU, at a small shape. -> results/dsa-cuda or dsa-cpu, .json and .png."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import dsa

    device, sparse = "cpu", dsa.dsa_attention
    if torch.cuda.is_available():
        from dsa_triton import dsa_attention as sparse

        device = "cuda"
    torch.set_num_threads(1)
    shape = DSA_SHAPES[device]
    query_heads, key_heads, width = shape["heads"]

    def dense(backend, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    result = {"machine": describe_machine(), **shape, "chunks": "16 of 64", "rows": []}
    for length in tqdm(shape["lengths"], unit="length"):
        tensors = [
            torch.randn(length, heads, width, dtype=getattr(torch, shape["dtype"]), device=device)
            for heads in (query_heads, key_heads, key_heads)
        ]
        tables = dsa.packed_tables(torch.tensor([0, length], device=device), 64)
        ways = {f"dense {backend}": partial(dense, backend) for backend in shape["dense"]}
        for block in shape["query_blocks"]:
            name = f"sparse, query block {block}"
            ways[name] = partial(sparse, tables=tables, top_k=16, query_block=block)
        row: dict = {"length": length}
        for backward, kind in ((False, "forward"), (True, "forward+backward")):
            found: dict[str, list] = {name: [] for name in ways}
            for _ in range(rounds + 1):  # the first warms up
                for name in list(found):
                    try:
                        found[name].append(attention_cost(ways[name], tensors, backward))
                    except RuntimeError as error:  # a backend that does not run here
                        tqdm.write(f"{name} at {length}: {str(error).splitlines()[0]}")
                        del found[name]
            row[kind] = {
                name: {"ms": spread([c[0] for c in costs[1:]]), "peak_mib": costs[-1][1]}
                for name, costs in found.items()
            }
        result["rows"].append(row)
        tqdm.write(json.dumps(row))
        save_result(f"dsa-{device}", result)
    draw_dsa(device)


def attention_cost(way, tensors: list, backward: bool) -> tuple[float, float]:
    """Milliseconds, and MiB that it adds to a GPU's memory at its peak (0 on a CPU)."""
    import torch

    gpu, before = tensors[0].is_cuda, 0
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    inputs = [x.detach().requires_grad_(backward) for x in tensors]
    start = time.perf_counter()
    out = way(*inputs)
    if backward:
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if gpu else 0
    return 1e3 * seconds, round(peak / 2**20, 1)


def draw_dsa(device: str) -> None:
    """Time against context length, dense and sparse, from results/dsa-*.json."""
    import matplotlib.pyplot as plt

    result = load_result(f"dsa-{device}")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, kind in zip(axes, ("forward", "forward+backward"), strict=True):
        for name in result["rows"][0][kind]:
            rows = [r for r in result["rows"] if name in r[kind]]
            points = [(r["length"], r[kind][name]["ms"]["median"]) for r in rows]
            axis.plot(*zip(*points, strict=True), "o-", label=name)
        axis.set(xscale="log", yscale="log", xlabel="context (tokens)", title=kind)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time (ms)")
    axes[0].legend()
    figure.savefig(RESULTS / f"dsa-{device}.png", dpi=120)
    plt.close(figure)
