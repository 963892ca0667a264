"""qwen.py: how fast a model of Qwen3's form is, with random weights from a Hugging Face folder.

    python bench.py qwen                 # 1M parameters, on a CPU
    python bench.py qwen --size 0.6B     # on one GPU, in bfloat16
    python bench.py folder               # does it learn? 1M parameters, both trainers, adapters

A decode step is measured against the time to read all weights and all keys and values once, at the
speed at which this machine copies memory; the learner against a large matrix product of the same
precision, with 6 operations a parameter and token.
Left out: the published weights, and sparse attention (speed.py).
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

import cache as caches
from fast.graphs import Captured
from lab.plots import go_on, markdown, save_result
from lab.races import run_command
from lab.speed import bandwidth, full_cache, in_turn
from logprobs import generated_logprobs
from model import GPT, ModelConfig, pack_tokens
from runtime.config import one_of
from runtime.huggingface import load_weights
from runtime.pictures import steps_of

SIZES = {  # layers, width, heads, key heads, head width, hidden, vocabulary
    "1M": (4, 128, 4, 2, 32, 384, 2_000),
    "0.6B": (28, 1024, 16, 8, 128, 3072, 151_936),
    "1.7B": (28, 2048, 16, 8, 128, 6144, 151_936),
}
PEAKS = {"H100": 989, "H200": 989}  # TFLOP/s in bfloat16, dense, SXM (NVIDIA's data sheets)
FIELDS = ("layers", "width", "heads", "kv_heads", "head_width", "hidden", "vocab_size")


@dataclass(frozen=True)
class QwenConfig:
    """What is measured."""

    size: str = one_of("of the random model", *SIZES)


def bench_folder(folder: Path) -> None:
    """A random folder that transformers has written learns, and is given back."""
    from folder_run import learning

    learning(folder)


def bench_qwen(folder: Path, config: QwenConfig) -> None:
    """Decode step, learner and whole loop of a random model of one size."""
    large = torch.cuda.is_available()
    # 256 slots of 4096 tokens would take 120 GB
    measure_parts(folder, config.size, [*product((16, 64, 256), (512,)), (16, 4096)])
    torch.cuda.empty_cache()  # the runs need the memory
    measure_loop(folder, config.size, 2048 if large else 256)


def random_model(folder: Path, size: str) -> tuple[Path, dict, str]:
    """The folder of a random model, its shape and its dtype on this machine."""
    from folder_run import write_large

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    shape, path = dict(zip(FIELDS, SIZES[size], strict=True)), folder / "model"
    if not (path / "generation_config.json").exists():  # is written last
        write_large(path, shape, dtype)
    return path, shape, dtype


def measure_parts(folder: Path, size: str, cases: list[tuple]) -> None:
    """Decode steps of (slots, context), and the learner; what was measured before is left out."""
    path, shape, dtype = random_model(folder, size)
    large = torch.cuda.is_available()
    torch.set_num_threads(1)
    how = {"positions": "rope", "qk_norm": True, "context": 4096, "recompute": large}
    model = GPT(ModelConfig(**shape, **how), None, getattr(torch, dtype))
    load_weights(model, path)
    model.on("cuda" if large else "cpu")
    copied, product_s = bandwidth(model.flat.device), products(model)
    result = go_on(folder, "qwen", {"size": size, "dtype": dtype, "decode": []})
    result |= {"copied_gb_per_s": copied / 1e9, "product_tflops": product_s / 1e12}
    known = [(row["slots"], row["context"]) for row in result["decode"]]
    for slots, context in [case for case in cases if case not in known]:
        result["decode"].append(decode_row(model, slots, context, copied))
        save_result(folder, "qwen", result)
    if "learner" not in result:
        tokens_per_s = learner_speed(model)
        used = 6 * len(model.flat) * tokens_per_s
        result["learner"] = {"tokens_per_s": tokens_per_s, "tflops": used / 1e12}
        save_result(folder, "qwen", result)


def measure_loop(folder: Path, size: str, most: int) -> None:
    """Both trainers with that model and log-normal answers of at most so many tokens."""
    path, _, dtype = random_model(folder, size)
    result = go_on(folder, "qwen", {"size": size, "dtype": dtype, "decode": []})
    loop = result.setdefault("loop", {"most": most, "tokens_per_s": {}})
    for trainer in ("train_sync.py", "train_async.py"):
        if trainer not in loop["tokens_per_s"]:
            speed = loop_speed(folder, trainer, path, dtype, most)
            loop["tokens_per_s"][trainer] = speed
            save_result(folder, "qwen", result)


def qwen_lines(result: dict) -> list[str]:
    """What of the bounds a decode step and the learner reach, and what both trainers generate."""
    rows = []
    for row in result["decode"]:
        what = f"decode, {row['slots']} slots, {row['context']} tokens: ms a step"
        rows.append([what, f"{row['ms']:.2f} ({row['of_memory_bound']:.0%} of what memory allows)"])
    if learner := result.get("learner"):
        share = learner["tflops"] / result["product_tflops"]
        peak = [tflops for card, tflops in PEAKS.items() if card in str(result["machine"]["gpus"])]
        used = "".join(f"; MFU {learner['tflops'] / tflops:.0%}" for tflops in peak)
        text = f"{learner['tokens_per_s']:,.0f} ({share:.0%} of a matrix product{used})"
        rows.append(["learner, 6 operations a weight: tokens/s", text])
    if loop := result.get("loop"):
        speeds = loop["tokens_per_s"]
        for trainer, speed in speeds.items():
            ratio = speed / speeds["train_sync.py"]
            what = f"{trainer}, answers up to {loop['most']} tokens: tokens/s"
            rows.append([what, f"{speed:,.0f} ({ratio:.2f}×)"])
    return markdown([f"Qwen3's form, {result['size']}, random, {result['dtype']}", ""], rows)


def median_of(way: Callable) -> float:
    """Median seconds of a call, after one that warms up."""
    return float(np.median(in_turn({"way": way}, rounds=5)["way"]))


def products(model: GPT) -> float:
    """Operations a second of a large matrix product."""
    side = 8192 if model.flat.is_cuda else 1024
    matrix = model.flat.new_ones(side, side)
    return 2 * side**3 / median_of(lambda: matrix @ matrix)


@torch.no_grad()
def decode_row(model: GPT, slots: int, context: int, copied: float) -> dict:
    """Milliseconds of a decode step, and which share of the memory bound that is."""
    cache, *inputs = full_cache(model, slots, context)

    def step(*given):
        return model.logits(caches.decode(model, cache, *given))

    seconds = median_of(partial(Captured(step) if model.flat.is_cuda else step, *inputs))
    read = model.flat.nbytes + cache.kv.nbytes
    share = read / copied / seconds
    return {"slots": slots, "context": context, "ms": 1e3 * seconds, "of_memory_bound": share}


def learner_speed(model: GPT) -> float:
    """Tokens a second, forward and backward, of 8 packed sequences (16k tokens on a GPU)."""
    length, words = 2048 if model.flat.is_cuda else 64, model.config.vocab_size
    tokens = np.random.default_rng(0).integers(words, size=(8, length))
    packed = pack_tokens(list(tokens), model.flat.device)
    rows = (packed.positions > 0).nonzero()[:, 0]
    alphabet = torch.arange(words, device=rows.device)

    def learn():
        model.flat_grad.zero_()
        logprobs, *_ = generated_logprobs(model, packed, rows, alphabet, 1.0)
        logprobs.mean().backward()

    return tokens.size / median_of(learn)


def loop_speed(folder: Path, trainer: str, model: Path, dtype: str, most: int) -> float:
    """Generated tokens a second of a whole run, after its first step."""
    flags = {"model": model.resolve(), "dtype": dtype, "task": f"tests/lengths.py:{most}"}
    flags |= {"groups_per_step": 8, "group_size": 8, "slots": 64, "reference_every": 0}
    flags |= {"checkpoint_every": 10**6, "eval_every": 10**6, "token_budget": 16384, "lr": 1e-6}
    flags |= {"recompute": "yes", "eval_when": "late"}  # memory; no evaluation within the time
    run = folder / trainer.removesuffix(".py")
    shutil.rmtree(run, ignore_errors=True)  # of an attempt that was cut
    run_command(trainer, run, steps=4, **flags)
    first, *rows = steps_of(run)
    return sum(row["tokens"] for row in rows) / (rows[-1]["t"] - first["t"])
