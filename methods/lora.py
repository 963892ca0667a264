"""lora.py: low-rank adapters, which alone are trained: x @ (W + 2 A B) in place of x @ W.

LoRA (arXiv 2106.09685, with alpha = 2 r). A training step moves and keeps moments of the adapters
only. In float32 a generator adds them up once a version (`weights_to_generate`), so that a token
costs no more than without them.

Axes: r rank
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

SCALE = 2.0  # alpha / r
MATRICES = ("qkv", "attention_out", "gate_up", "mlp_out")  # of a layer


class Adapters:
    """What a block of model.py becomes with it: its matrices W [in, out] have adapters A [in, r]
    and B [r, out]."""

    def __init__(self, config):
        super().__init__(config)
        for name in MATRICES:
            rows, columns = getattr(self, name).shape
            self.register_parameter(f"{name}_a", nn.Parameter(torch.empty(rows, config.lora)))
            self.register_parameter(f"{name}_b", nn.Parameter(torch.empty(config.lora, columns)))

    def project(self, name: str, x: Tensor, add=None) -> Tensor:
        """x @ (W + 2 A B) + `add`."""
        A, B = getattr(self, f"{name}_a"), getattr(self, f"{name}_b")
        return torch.addmm(super().project(name, x, add), x @ A, B, alpha=SCALE)


@torch.no_grad()
def merged(model, into=None):
    """The same policy, a GPT, without adapters: W + 2 A B are its matrices. into: one made before.
    A model without adapters is returned as it is."""
    if not model.config.lora:
        return model
    plain = replace(model.config, lora=0)
    into = into or type(model)(plain, None, model.flat.dtype).on(model.flat.device)
    into.flat.copy_(model.frozen)
    for layer, plain in zip(model.layers, into.layers, strict=True):
        for name in MATRICES:
            A, B = getattr(layer, f"{name}_a"), getattr(layer, f"{name}_b")
            getattr(plain, name).addmm_(A, B, alpha=SCALE)
    return into


def generating(policy):
    """The model that generates for a policy. In float32 its adapters are merged; in bfloat16 they
    stay apart, because rounding would lose most of what they add."""
    return merged(policy) if policy.flat.dtype == torch.float32 else policy


def weights_to_generate(policy, model, flat: Tensor) -> Tensor:
    """What `model`, made by `generating`, is to compute with when the policy gets weights [P]."""
    if model is policy:
        return flat
    policy.flat.copy_(flat)
    return merged(policy, into=model).flat
