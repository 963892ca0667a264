"""kernels.py: which functions compute attention: those of dsa_triton.py, or plain PyTorch's.

On a GPU the kernels are the reason for sparse attention: forward and backward at 128k tokens is
13.5 times as fast as cuDNN's dense attention on an H200, at 8k 0.6 times (docs/measured.md).
"""

from types import ModuleType

import torch

import dsa


def use_triton(config, device: torch.device) -> bool:
    """Whether attention of a model is computed by the kernels of dsa_triton.py."""
    return config.kernels == "triton" or (config.kernels == "auto" and device.type == "cuda")


def sparse_kernels(config, device: torch.device) -> ModuleType:
    """dsa.py, or dsa_triton.py with functions of the same names."""
    if not use_triton(config, device):
        return dsa
    import dsa_triton

    return dsa_triton


def dense_kernels(config, device: torch.device) -> tuple | None:
    """`plan_dense` and `dense_decode` of dsa_triton.py, where they can be used (see cache.py)."""
    if not use_triton(config, device):
        return None
    from dsa_triton import WIDTHS, dense_decode, plan_dense

    return (plan_dense, dense_decode) if config.head_width in WIDTHS else None
