"""adamw.py: torch's AdamW, called as a function.

`torch.optim.AdamW` calls this function, too, but first it imports torch's compiler, which takes 1.2
seconds or more.
Left out: clipping, and the learning rate's way down (learner.py).
"""

import torch
from torch import nn
from torch.optim.adamw import adamw


def adamw_moments(weights: nn.Parameter) -> dict:
    """What AdamW remembers of weights."""
    moments = {name: torch.zeros_like(weights) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": weights.new_zeros(()), **moments}


def adamw_step(weights: nn.Parameter, moments: dict, lr: float):
    """A step by AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    # Less momentum than usual: staleness acts as momentum does (Mitliagkas et al. 2016, arXiv
    # 1605.09774). And gradient sizes of the last 100 steps: the usual 1000 are more than a run has.
    memory = [[moments[name]] for name in ("exp_avg", "exp_avg_sq")]
    tensors = [weights], [weights.grad], *memory, [], [moments["step"]]
    switches = {"fused": True, "amsgrad": False, "maximize": False}
    adamw(*tensors, lr=lr, beta1=0.7, beta2=0.99, weight_decay=0.0, eps=1e-8, **switches)
