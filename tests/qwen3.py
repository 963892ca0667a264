"""tests/qwen3.py: the model's weights under the names and shapes of Qwen3 checkpoints."""

from torch import Tensor

from model import GPT


def named_weights(model: GPT) -> dict[str, Tensor]:
    """Every weight under its Qwen3 name and shape, as a view: copying into it changes the model.

    Learned positions and the indexer, which Qwen3 lacks, have names of the same kind.
    """
    c = model.config
    views = {"model.embed_tokens.weight": model.embed_tokens.weight}
    if c.positions == "learned":
        views["model.embed_positions.weight"] = model.embed_positions.weight
    for i, layer in enumerate(model.layers):
        for name, weight in layer_weights(layer).items():
            views[f"model.layers.{i}.{name}"] = weight
    views["model.norm.weight"] = model.norm.weight
    return {name: weight.detach() for name, weight in views.items()}


def layer_weights(layer) -> dict[str, Tensor]:
    """The weights of one layer; matrices are [out, in] there, and fused ones apart."""
    c = layer.config
    sizes = [heads * c.head_width for heads in (c.heads, c.kv_heads, c.kv_heads)]
    q, k, v = layer.qkv.t().split(sizes)
    gate, up = layer.gate_up.t().chunk(2)
    views = {
        "input_layernorm.weight": layer.attention_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": layer.attention_out.t(),
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.mlp_out.t(),
    }
    if c.qk_norm:
        views["self_attn.q_norm.weight"] = layer.q_norm
        views["self_attn.k_norm.weight"] = layer.k_norm
    if c.indexed:
        for name, weight in layer.indexer.named_parameters():
            views[f"self_attn.indexer.{name}"] = weight
    return views
