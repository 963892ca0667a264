"""What `python bench.py folder` and `qwen` are made of: folders with random models, and whether one
of them learns, is written out again, and means the same to transformers.
"""

import json
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from model_folders import write_folder
from tqdm import tqdm

from lab.plots import save_result
from lab.races import run_command
from model import GPT, ModelConfig
from reward import make_task
from rollout import Generator, generate, make_environment
from runtime.config import Config
from runtime.devices import describe_machine
from runtime.folder import read_lines
from runtime.huggingface import export, load_weights, read_shape
from runtime.messages import Group
from runtime.tokenizer import tokenizer_of

# With RoPE and from random weights, `reverse` needs a large entropy bonus: else it settles early.
LEARN = {"task": "reverse:4", "entropy": 0.15}
WAYS = {
    "sync": {"trainer": "train_sync.py", "lr": 7e-4, "steps": 500},
    "async": {"trainer": "train_async.py", "lr": 7e-4, "steps": 500},
    "sync, LoRA 8": {"trainer": "train_sync.py", "lr": 2e-3, "steps": 300, "lora": 8},
}


def learning(folder: Path) -> None:
    """A random model of 1M parameters and 2,000 tokens, written by transformers, learns
    `reverse:4`, in both trainers and by adapters; transformers reads what comes out."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    shape = {"head_dim": 32, "initializer_range": 0.02, "rope_parameters": rope}
    model = write_folder(folder / "model", norms=False, **shape)
    result = {"machine": describe_machine(), "runs": {}}
    for name, way in tqdm(WAYS.items(), unit="run"):
        place = name.replace(", ", "-").replace(" ", "-")
        run, out = folder / place, folder / f"{place}-out"
        flags = way | LEARN | {"model": model.resolve(), "export": out.resolve()}
        summary = run_command(flags.pop("trainer"), run, **flags)
        rows = read_lines(run / "metrics.jsonl")
        reached = [row["t"] for row in rows if row.get("eval", {}).get("solved", 0) >= 0.95]
        result["runs"][name] = {
            "solved": summary["eval"]["after"]["solved"],
            "seconds_to_95": min(reached, default=None),
            "command_s": summary["command_s"],
            "mismatch": summary["mismatch"],
            "published_bytes": summary["published_bytes"],
            "optimizer_bytes": summary["optimizer_bytes"],
            "same_answers": same_answers(out),
        }
        tqdm.write(f"{name}: {result['runs'][name]}")
        save_result(folder, "folder", result)


def same_answers(folder: Path, count: int = 64) -> str:
    """Of held-out prompts, how many transformers answers as this project does: greedily, with the
    task's tokens only."""
    import transformers

    config = Config(model=str(folder))
    task = make_task(LEARN["task"], 0, tokenizer_of(config))
    shape = read_shape(folder, task.context)
    model = GPT(ModelConfig(**shape), None)
    load_weights(model, folder)
    environment = make_environment(config, task)
    sizes = {"slots": 32, "capacity": task.context, "group_size": 1, "temperature": 0.0}
    problems = [Group(i, 0, task.reset(i, "eval")) for i in range(count)]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    allowed, same = environment.alphabet.tolist(), 0
    for group in generate(Generator(model, environment, **sizes), problems):
        (t,) = group.trajectories
        prompt = tokenizer(group.problem["prompt"], return_tensors="pt").input_ids
        found = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=task.turn_tokens,
            prefix_allowed_tokens_fn=lambda *_: allowed,
            pad_token_id=allowed[-1],
        )
        same += np.array_equal(found[0].numpy(), t.tokens)
    return f"{same} of {count}"


def write_large(folder: Path, shape: dict, dtype: str) -> Path:
    """A random model of this shape; its vocabulary is all bytes, and as many pairs and triples of
    them as there must be. It needs no transformers."""
    how = {"positions": "rope", "qk_norm": True, "rope_base": 1e6, "init_std": 0.02}
    model = GPT(ModelConfig(**shape, **how, context=40_960), 0)
    export(model, Config(dtype=dtype), folder)
    path = folder / "tokenizer.json"
    found, words = json.loads(path.read_text()), shape["vocab_size"]
    letters = [name for name, i in found["model"]["vocab"].items() if i < 256]
    pairs = [[a, b] for a, b in product(letters, letters)]
    triples = ([a + b, c] for a, b, c in product(letters, letters, letters))
    merges = [*pairs, *islice(triples, max(0, words - 258 - len(pairs)))][: words - 258]
    names = [*letters, *(a + b for a, b in merges)]
    found["model"] |= {"vocab": {name: i for i, name in enumerate(names)}, "merges": merges}
    for token, number in zip(found["added_tokens"], (words - 2, words - 1), strict=True):
        token["id"] = number
    path.write_text(json.dumps(found))
    stop = {"eos_token_id": [words - 2]}
    (folder / "generation_config.json").write_text(json.dumps(stop))
    return folder
