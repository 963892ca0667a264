"""models.py: from flags, a file or a run to a policy: its shape and its weights.

Left out: Hugging Face folders (huggingface.py), the rest of a run (run.py).
"""

from pathlib import Path

from model import GPT, PRESETS, ModelConfig
from reward import Task
from runtime.checkpoint import newest_weights
from runtime.config import Config, blame, require
from runtime.huggingface import base_model, read_shape
from tasks import limits


def make_model(config: Config, task: Task, stored: dict | None = None) -> GPT:
    """The policy, large enough for the task's episodes: random weights, those of a Hugging Face
    folder, or those of --init (with the vocabulary of --model).

    stored: a checkpoint, which has the shape of --init and newer weights. Raises UserError.
    """
    if config.init:
        require(not config.lora, f"--lora {config.lora}: must be 0 with --init")
        needed = "must be a weights file of pretrain.py, or a run folder, that fits"
        with blame(f"--init {config.init}: {needed}", (Exception, limits.OutOfTime)):
            return model_of(stored or newest_weights(Path(config.init)), config, task)
    if config.model in PRESETS:
        shape = PRESETS[config.model] | {"positions": config.positions, "context": task.context}
        shape |= {"vocab_size": task.tokenizer.size, "qk_norm": config.qk_norm == "yes"}
    else:
        shape = read_shape(Path(config.model), task.context)
    for name in ("attention", "scoring", "chunk_size", "top_k", "lora"):
        shape[name] = getattr(config, name)
    return base_model(config, ModelConfig(**shape), stored is not None)


def model_of(stored: dict, config: Config, task: Task) -> GPT:
    """A model of stored shape and weights; almost any error where they are none, or do not fit."""
    shape = dict(stored["shape"])
    if shape["positions"] != "learned":
        shape["context"] = task.context
    most = shape["context"]
    require(task.context <= most, f"{task.context} positions for {config.task}, has {most}")
    found = shape["vocab_size"]
    words = task.tokenizer.size
    require(found == words, f"{found} tokens, and {words} of --model {config.model}")
    weights = stored["weights"]
    # what a stranger calls a shape may be larger than any memory
    with limits.time_limit(60.0), limits.memory_limit(4096 + weights.nbytes / 2**18):
        model = GPT(ModelConfig(**shape), None)
    require(weights.shape == model.flat.shape, f"{[*weights.shape]} weights for its shape")
    model.flat.copy_(weights)
    return model
