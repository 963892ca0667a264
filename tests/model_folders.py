"""tests/model_folders.py: random model folders, written by transformers, and weights by name.

`write_folder` makes what a download would be, small: about a million parameters, 2,000 tokens.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import GPT
from runtime import huggingface

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# The pattern of Qwen's tokenizer.json (https://huggingface.co/Qwen/Qwen3-0.6B).
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
REASON = "needs transformers and tokenizers: pip install -r requirements-dev.txt"


def named_weights(model: GPT) -> dict[str, Tensor]:
    """Every weight under its Qwen3 name and shape, as a view; learned positions and the indexer,
    which Qwen3 lacks, have names of the same kind."""
    views = huggingface.named_weights(model)
    if model.config.positions == "learned":
        views["model.embed_positions.weight"] = model.embed_positions.weight.detach()
    for i, layer in enumerate(model.layers if model.config.indexed else ()):
        for name, weight in layer.indexer.named_parameters():
            views[f"model.layers.{i}.self_attn.indexer.{name}"] = weight.detach()
    return views


@cache
def trained_tokenizer(vocab: int) -> str:
    """tokenizer.json of a byte-level BPE that is trained on this project's own text."""
    tokenizers = pytest.importorskip("tokenizers", reason=REASON)
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL[:3],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    root = Path(__file__).parent.parent
    texts = [path.read_text() for path in sorted([*root.glob("*.py"), *root.glob("*.md")])]
    tokenizer.train_from_iterator([*texts, CHINESE, ARABIC], trainer)
    # as in Qwen3, they are no special tokens there
    thoughts = [
        tokenizers.AddedToken(name, special=False, normalized=False) for name in SPECIAL[3:]
    ]
    tokenizer.add_tokens(thoughts)
    return tokenizer.to_str()


CHINESE = "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。" * 20
ARABIC = "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق." * 20


def write_folder(path: Path, vocab: int = 2000, **shape) -> Path:
    """A random Qwen3 (or another `family`) with a tokenizer, as a download would be. shape: fields
    of its config, `shard`, the largest size of a file, such as "1MB", and `norms`, whether theirs
    are random; biases are, too."""
    transformers = pytest.importorskip("transformers", reason=REASON)
    text = trained_tokenizer(vocab - 2)  # 2: the thoughts
    ids = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "intermediate_size": 384,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
        "initializer_range": 0.08,
        "eos_token_id": ids["<|im_end|>"],
    }
    seed, shard = shape.pop("seed", 0), shape.pop("shard", "5GB")
    norms, family = shape.pop("norms", True), shape.pop("family", "Qwen3")
    dtype = shape.pop("dtype", torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        facts = {name: x for name, x in (sizes | shape).items() if x is not None}
        config = getattr(transformers, f"{family}Config")(**facts)
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
        for name, weight in model.named_parameters():
            if "bias" in name:
                torch.nn.init.uniform_(weight, -0.5, 0.5)
            if norms and "norm" in name:  # all ones would hide a norm that is left out
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    stops = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config = transformers.GenerationConfig(eos_token_id=stops)
    model.save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text(text)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
