"""qwen.py: how a model of Qwen3's form trains, with random weights from a Hugging Face folder.

    python bench.py qwen                 # 1M parameters, on a CPU
    python bench.py qwen --size 0.6B     # on one GPU, in bfloat16
    python bench.py folder               # does it learn? 1M parameters, both trainers, adapters

`qwen` runs both trainers on answers of very different lengths, and tells what they get done.
Left out: the published weights, and the speed of parts (speed.py).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from lab.plots import column, save_result
from lab.races import run_command
from runtime.config import flag
from runtime.devices import describe_machine
from runtime.folder import read_lines

SIZES = {  # layers, width, heads, key heads, head width, hidden, vocabulary
    "1M": (4, 128, 4, 2, 32, 384, 2_000),
    "0.6B": (28, 1024, 16, 8, 128, 3072, 151_936),
    "1.7B": (28, 2048, 16, 8, 128, 6144, 151_936),
}
FIELDS = ("layers", "width", "heads", "kv_heads", "head_width", "hidden", "vocab_size")
FLAGS = {"steps": 4, "groups_per_step": 8, "group_size": 8, "slots": 64, "token_budget": 16384}
FLAGS |= {"reference_every": 0, "checkpoint_every": 10**6, "eval_every": 10**6, "lr": 1e-6}


@dataclass(frozen=True)
class QwenConfig:
    """What is measured."""

    size: str = flag("1M", "of the random model", choices=tuple(SIZES))


def bench_folder(folder: Path) -> None:
    """A random folder that transformers has written learns, and is given back."""
    from folder_run import learning

    learning(folder)


def bench_qwen(folder: Path, config: QwenConfig) -> None:
    """Both trainers with a random model of one size: tokens a second of the whole loop, which are
    trained as they are made, after the first step; and of the learner, while it works."""
    from folder_run import write_large

    longest, dtype = (2048, "bfloat16") if torch.cuda.is_available() else (256, "float32")
    shape = dict(zip(FIELDS, SIZES[config.size], strict=True))
    model = write_large(folder / "model", shape, dtype)
    flags = FLAGS | {
        "model": model.resolve(),
        "dtype": dtype,
        "task": f"tests/lengths.py:{longest}",
    }
    result = {"machine": describe_machine(), "size": config.size, "dtype": dtype}
    for mode in ("sync", "async"):
        run = folder / mode
        summary = run_command(f"train_{mode}.py", run, **flags)
        first, *rows = [row for row in read_lines(run / "metrics.jsonl") if "seconds" in row]
        speed = sum(column(rows, "tokens")) / (rows[-1]["t"] - first["t"])
        speeds = {"loop": round(speed), "learner": summary["learner_tokens_per_s"]}
        result[f"{mode}_tokens_per_s"] = speeds
    print(result)
    save_result(folder, "qwen", result)
