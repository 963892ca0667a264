"""gpu.py: what one GPU can be asked in 12 minutes, in the order of its worth.

    python bench.py gpu                     # on an H100 or H200; a page of Markdown at the end
    python bench.py gpu --out DIR           # the same DIR again: it goes on where it stopped
    python bench.py gpu --rehearse yes      # the same parts, tiny, interpreted on a CPU

Each part is a process with a time limit of its own, and saves every figure as soon as it has it. A
part that fails, or is cut off, leaves its last words in place of what is missing.
Left out: the measurements themselves (speed.py, races.py), and several GPUs.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import dsa
from lab.campaigns import Smollm2Config, bench_smollm2
from lab.plots import RESULTS, go_on, save_result
from lab.races import SYNC, run_each, speed_of
from lab.speed import DTYPE, attention, decoding, measure_model, random_model
from runtime.config import flag, one_of, require
from runtime.devices import describe_machine

# ------------------------------------------------------------------------------- are they right?


CASES = {  # chunk size, chunks of a list, query block, by an indexer: on a card, in a rehearsal
    "16 chunks of 64": ((64, 16, 1, False), (16, 2, 1, False)),
    "16 chunks of 64, blocks of 16": ((64, 16, 16, False), (16, 2, 8, False)),
    "16 chunks of 64, indexer": ((64, 16, 1, True), (16, 2, 1, True)),
    "64 single tokens": ((1, 64, 1, False), (1, 9, 1, False)),
    "2,048 single tokens, indexer": ((1, 2048, 1, True), (1, 12, 1, True)),
    "decoding": ((16, 16, 8192), (16, 3, 128)),  # and keys of a slot
}


def kernels(folder: Path, small: bool) -> None:
    """Every kernel against dsa.py in float64, of the same inputs and lists."""
    import dsa_triton

    if small:  # short sequences are united, too; the interpreter sorts element by element
        import quick_interpreter

        quick_interpreter.install()
        dsa_triton.LONG_CONTEXT, dsa_triton.SCORE_ROWS, dsa_triton.STREAMED = 0, 16, 8
    result = go_on(folder, "kernels", {"rows": []})
    known = [(row["case"], row["dtype"]) for row in result["rows"]]
    for dtype in (torch.float32, torch.float16 if small else torch.bfloat16):
        name, length = str(dtype).removeprefix("torch."), 50 if small else 3584
        width = 16 if small else 64

        def numbers(*shape, dtype=dtype, size=(length,), width=(width,)):
            return torch.randn(size + shape + width).to("cpu" if small else "cuda", dtype)

        for case, sizes in CASES.items():
            compare = compare_decoding if case == "decoding" else compare_training
            if (case, name) not in known:
                torch.manual_seed(0)
                row = {"case": case, "dtype": name} | compare(numbers, *sizes[small])
                result["rows"].append(row)
                save_result(folder, "kernels", result)


def error(found, exact) -> float:
    """The largest difference, over the largest value."""
    return float(((found.double() - exact).abs().max() / exact.abs().max()).detach())


def compare_training(numbers, chunk_size: int, top_k: int, block: int, learned: bool) -> dict:
    """Two sequences: are the lists the same, is it the same bitwise when it is repeated, and errors
    of output and gradients."""
    import dsa_triton

    q, k, v, weight = numbers(16), numbers(2), numbers(2), numbers(16)
    index = (numbers(4), numbers(), numbers(4)[:, :, 0].contiguous()) if learned else None
    edges = torch.tensor([0, len(q) // 3, len(q)], device=q.device)
    tables = dsa.packed_tables(edges, chunk_size)
    lists = dsa_triton.select_chunks(q, k, tables, top_k, index, None, block)
    plain = dsa.select_chunks(q, k, tables, top_k, index)[dsa_triton.block_lead(tables, block)]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    twice = [dsa_triton.dsa_attention(*inputs, tables, top_k, index, None, block) for _ in "ab"]
    grads = [torch.autograd.grad(out, inputs, weight) for out in twice]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = dsa.sparse_attention(*exact, lists, tables)
    wanted = (out, *torch.autograd.grad(out, exact, weight.double()))
    return {
        "largest error": max(map(error, (twice[0], *grads[0]), wanted)),
        "same lists": float((lists.sort(-1)[0] == plain.sort(-1)[0]).double().mean()),
        "repeats bitwise": torch.equal(*twice) and torch.equal(grads[0][0], grads[1][0]),
    }


@torch.no_grad()
def compare_decoding(numbers, chunk_size: int, top_k: int, room: int) -> dict:
    """A token of four slots of different lengths, dense and sparse: errors of the output."""
    import dsa_triton

    q, k, v = numbers(16)[:4], numbers(2, size=(4 * room,)), numbers(2, size=(4 * room,))
    lengths = torch.tensor([room, room // 2, 1, room - 1], device=q.device)
    tables = dsa.cache_tables(lengths, room, chunk_size)
    plan = dsa_triton.plan_dense(lengths - 1, room, 2)
    apart = [x.unflatten(0, (4, room)).transpose(1, 2).contiguous() for x in (k, v)]
    twice = []
    for _ in "ab":
        dense = dsa_triton.dense_decode(q, *(x.transpose(1, 2) for x in apart), plan)
        twice.append((dsa_triton.dsa_attention(q, k, v, tables, top_k), dense))
    errors = []
    for output, many in zip(twice[0], (top_k, tables.widest), strict=True):
        lists = dsa.select_chunks(q, k, tables, many)  # by which the kernels go, too
        exact = dsa.sparse_attention(q.double(), k.double(), v.double(), lists, tables)
        errors.append(error(output, exact))
    return {"largest error": max(errors), "repeats bitwise": all(map(torch.equal, *twice))}


# ----------------------------------------------------------------------------------- other parts


# Adam's learning rate goes down as the width goes up (Yang et al. 2021, arXiv 2203.03466)
MEDIUM = {"model": "medium", "lr": 6e-4 * 64 / 320, "token_budget": 65536, "steps": 60}
MEDIUM |= {"slots": 256, "eval_every": 10, "groups_per_step": 16}
TINY = {"model": "tiny", "steps": 3, "groups_per_step": 4, "group_size": 4, "slots": 16}
TINY |= {"eval_every": 1, "device": "cpu"}
LONG = {"groups_per_step": 8, "group_size": 8, "slots": 64, "reference_every": 0, "steps": 6}
LONG |= {"eval_every": 10**6, "token_budget": 16384, "lr": 1e-6, "silence": 60}


def race(folder: Path, *changes: dict) -> None:
    """`sum` with model `medium`, synchronous and asynchronous."""
    raced(folder, "sum", MEDIUM | dict(*changes), "sum")


def long_answers(folder: Path, size: str, most: int) -> None:
    """A random model with log-normal answers, synchronous and asynchronous."""
    path = random_model(folder, size).resolve()
    flags = LONG | {"model": path, "dtype": DTYPE}
    raced(folder, "long", flags, f"tests/lengths.py:{most}")


def raced(folder: Path, name: str, flags: dict, task: str) -> None:
    """Both trainers with the same flags; evaluations do not count."""
    result, plan = go_on(folder, "async-cuda", {"runs": []}), {}
    known = [(row["task"], row["mode"]) for row in result["runs"]]
    modes = {"async, η = 2": {"max_staleness": 2}, "sync, one GPU": SYNC}
    for mode, how in modes.items():
        if (name, mode) not in known:
            plan[f"{name}, {mode}"] = how | {"task": task} | flags
    for label, run, summary in run_each(plan, folder, eval_when="late"):
        row = {"task": name, "mode": label.partition(", ")[2], "seed": 0}
        result["runs"].append(row | speed_of(run, summary, name))
        save_result(folder, "async-cuda", result)


def published(folder: Path, seeds: int) -> None:
    """SmolLM2 learns sums, if its folder is there."""
    if seeds and Path("smollm2").exists():
        bench_smollm2(folder, Smollm2Config(seeds=seeds))


LENGTHS = [8192, 32768, 131072]
MODEL = "0.6B", [(16, 512), (64, 512), (16, 4096), (64, 4096)]  # slots, context
PARTS = {  # seconds on a card (720 in all), what is called, on a card and in a rehearsal with what
    "kernels": (90, kernels, (False,), (True,)),
    "dsa": (120, attention, (LENGTHS,), ([40], (2, 1, 16), 1)),
    "decode": (60, decoding, (LENGTHS,), ([128], 2)),
    "model": (90, measure_model, MODEL, ("1M", [(2, 64)])),
    "race": (80, race, (), (TINY,)),
    "long": (160, long_answers, ("0.6B", 1024), ("1M", 16)),
    "smollm2": (120, published, (1,), (0,)),
}


# -------------------------------------------------------------------------- one after the other


@dataclass(frozen=True)
class GpuConfig:
    """What is measured, and where it stays."""

    out: str = flag("", "folder of the results; where it has some, it goes on (empty: a new one)")
    part: str = one_of("only this one, without a limit", "all", *PARTS)
    rehearse: str = one_of("tiny, interpreted on a CPU: does everything run?", "no", "yes")


def bench_gpu(folder: Path, config: GpuConfig) -> None:
    """Every part that `folder` has not, each within its time."""
    small = config.rehearse == "yes"
    said = "gpu: must be run on a machine with a CUDA device (or --rehearse yes, tiny, on a CPU)"
    require(small or torch.cuda.is_available(), said)
    if config.part != "all":
        _, measure, *arguments = PARTS[config.part]
        return measure(folder, *arguments[small])
    machine = describe_machine()
    state = go_on(folder, "gpu", {"machine": machine, "rehearsal": small, "parts": {}})
    same = (state["machine"]["gpus"], state["rehearsal"]) == (machine["gpus"], small)
    require(same, f"--out {folder}: must be new, or a folder of this machine's GPU")
    todo = [name for name in PARTS if state["parts"].get(name, {}).get("how it ended") != "done"]
    for name in (bar := tqdm(todo, unit="part")):
        bar.set_description(name)
        begin = time.monotonic()
        end = run_part(name, folder, PARTS[name][0] * (10 if small else 1), small)
        seconds = round(time.monotonic() - begin, 1)
        state["parts"][name] = {"how it ended": end, "seconds": seconds}
        save_result(folder, "gpu", state)
        tqdm.write(f"{name}: {end}")


def run_part(name: str, folder: Path, limit: float, small: bool) -> str:
    """A part in a process of its own; returns how it ended: done, cut off, or with which error."""
    log = folder / f"{name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "bench.py", "gpu", f"--out={folder.resolve()}", f"--part={name}"]
    command += [f"--rehearse={'yes' if small else 'no'}"]
    rehearsed = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | (rehearsed if small else {})
    how = {"cwd": RESULTS.parent, "env": environment, "start_new_session": True}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, **how) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"cut off after {limit:.0f} s; what it had measured is kept"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    words = log.read_text().split("\n")
    last = next((line for line in reversed(words) if line.strip()), "")
    return f"failed: {last:.300}" if code else "done"
