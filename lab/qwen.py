"""qwen.py: how fast a model of Qwen3's form is, with random weights from a Hugging Face folder.

    python bench.py qwen                 # 1M parameters, on a CPU
    python bench.py qwen --size 0.6B     # on one GPU, in bfloat16
    python bench.py folder               # does it learn? 1M parameters, both trainers, adapters

A decode step is measured against the time to read all weights and all keys and values once, at the
speed at which this machine copies memory; the learner against a large matrix product of the same
precision, with 6 operations a parameter and token.
Left out: the published weights, and sparse attention (speed.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

import cache as caches
from lab.plots import save_result, steps_of
from lab.races import run_command
from lab.speed import bandwidth, full_cache, in_turn
from logprobs import generated_logprobs
from model import GPT, ModelConfig, pack_tokens
from runtime.config import one_of
from runtime.huggingface import load_weights

SIZES = {  # layers, width, heads, key heads, head width, hidden, vocabulary
    "1M": (4, 128, 4, 2, 32, 384, 2_000),
    "0.6B": (28, 1024, 16, 8, 128, 3072, 151_936),
    "1.7B": (28, 2048, 16, 8, 128, 6144, 151_936),
}
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
    from folder_run import write_large

    large = torch.cuda.is_available()
    dtype = "bfloat16" if large else "float32"
    torch.set_num_threads(1)
    shape = dict(zip(FIELDS, SIZES[config.size], strict=True))
    path = write_large(folder / "model", shape, dtype)
    how = {"positions": "rope", "qk_norm": True, "context": 4096, "recompute": large}
    model = GPT(ModelConfig(**shape, **how), None, getattr(torch, dtype))
    load_weights(model, path)
    model.on("cuda" if large else "cpu")
    copied, product_s = bandwidth(model.flat.device), products(model)
    result = {"size": config.size, "dtype": dtype, "decode": []}
    result |= {"copied_gb_per_s": copied / 1e9, "product_tflops": product_s / 1e12}
    cases = [*product((16, 64, 256), (512,)), *product((16, 64), (4096,) if large else ())]
    for slots, context in cases:  # 256 of 4096 tokens would take 120 GB
        result["decode"].append(decode_row(model, slots, context, copied))
        save_result(folder, "qwen", result)
    tokens_per_s = learner_speed(model)
    share = 6 * len(model.flat) * tokens_per_s / product_s
    result["learner"] = {"tokens_per_s": tokens_per_s, "of_product": share}
    save_result(folder, "qwen", result)
    del model
    torch.cuda.empty_cache()  # the runs need the memory
    result["loop_tokens_per_s"] = loop_speeds(folder, path, dtype)
    print(result)
    save_result(folder, "qwen", result)


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

    def step(given):
        return model.logits(caches.decode(model, cache, *given))

    captured = partial(caches.captured, step, inputs, [])
    seconds = median_of(captured if model.flat.is_cuda else partial(step, inputs))
    read = model.flat.nbytes + cache.racks[-1].kv[:, :, :slots].nbytes
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


def loop_speeds(folder: Path, model: Path, dtype: str) -> dict:
    """Generated tokens a second of whole runs, after their first step."""
    task = f"tests/lengths.py:{2048 if torch.cuda.is_available() else 256}"
    flags = {"model": model.resolve(), "dtype": dtype, "task": task, "steps": 4}
    flags |= {"groups_per_step": 8, "group_size": 8, "slots": 64, "reference_every": 0}
    flags |= {"checkpoint_every": 10**6, "eval_every": 10**6, "token_budget": 16384, "lr": 1e-6}
    flags |= {"recompute": "yes", "eval_when": "late"}  # memory; no evaluation within the time
    speeds = {}
    for trainer in ("train_sync.py", "train_async.py"):
        run = folder / trainer.removesuffix(".py")
        run_command(trainer, run, **flags)
        first, *rows = steps_of(run)
        speeds[trainer] = sum(row["tokens"] for row in rows) / (rows[-1]["t"] - first["t"])
    return speeds
