"""runtime/huggingface.py."""

from torch import Tensor

from model import GPT


def named_weights(model: GPT) -> dict[str, Tensor]:
    """Every weight under its Qwen3 name and shape, as a view: copying into it changes the model."""
    c, views = model.config, {"model.embed_tokens.weight": model.embed_tokens.weight}
    if c.positions == "learned":
        views["model.embed_positions.weight"] = model.embed_positions.weight
    for i, layer in enumerate(model.layers):
        q, k, v = layer.qkv.t().split([n * c.head_width for n in (c.heads, c.kv_heads, c.kv_heads)])
        gate, up = layer.gate_up.t().chunk(2)
        own = {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
        own |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.mlp_out.t()}
        own |= {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
        own["self_attn.o_proj"] = layer.attention_out.t()
        if c.qk_norm:
            own |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
        views |= {f"model.layers.{i}.{name}.weight": weight for name, weight in own.items()}
        if c.indexed:
            named = layer.indexer.named_parameters()
            views |= {
                f"model.layers.{i}.self_attn.indexer.{name}": weight for name, weight in named
            }
    views["model.norm.weight"] = model.norm.weight
    return {name: weight.detach() for name, weight in views.items()}
