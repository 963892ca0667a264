"""What `python bench.py smollm2` and `qwen` ask of folders: whether one means the same to
transformers, and one with a random model of any size.
"""

import json
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch

from model import GPT, ModelConfig
from reward import task_of
from rollout import Generator, generate, make_environment
from runtime.config import Config
from runtime.huggingface import export, load_weights, read_shape
from runtime.messages import Group


def same_answers(folder: Path, spec: str) -> str:
    """Of all held-out problems, in chats, how many transformers answers as this project does:
    greedily, both in float32."""
    import transformers

    config = Config(model=str(folder), chat="yes", task=spec, group_size=1, temperature=0.0)
    task = task_of(config)
    model = GPT(ModelConfig(**read_shape(folder, task.context)), None)
    load_weights(model, folder)
    generator = Generator(model, make_environment(config, task), config, task.context)
    problems = [Group(i, 0, task.reset(i, "eval")) for i in range(task.eval_size)]
    make = transformers.AutoModelForCausalLM.from_pretrained
    theirs, same = make(folder, dtype=torch.float32), 0
    for group in generate(generator, problems):
        (t,) = group.trajectories
        prompt = torch.tensor([task.tokenizer.encode_prompt(group.problem["prompt"])])
        how = {"do_sample": False, "max_new_tokens": task.turn_tokens, "pad_token_id": 0}
        how["attention_mask"] = torch.ones_like(prompt)
        same += np.array_equal(theirs.generate(prompt, **how)[0].numpy(), t.tokens)
    return f"{same} of {len(problems)}"


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
