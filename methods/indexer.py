"""indexer.py: the lightning indexer, which learns what sparse attention is to select.

`index_scores` (dsa.py) has its formula; without it, chunks are scored by the mean of their keys. It
is trained by the stages of pretrain.py (GLM-5, arXiv 2602.15763).

Axes: N queries · J indexer heads · E indexer head width
"""

import torch
from torch import Tensor, nn


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of the first half of the channels, halves (not neighbours) paired.

    x [N, H, E], positions [N] -> [N, H, E]. DeepSeek-V3.2-Exp (64 of 128 channels) warns in its
    README that its indexer needs this layout, unlike its attention.
    """
    quarter = x.shape[2] // 4
    left, right, still = x.tensor_split((quarter, 2 * quarter), dim=-1)
    step = torch.arange(quarter, device=x.device) / quarter
    angle = positions[:, None, None] * 10_000.0**-step  # [N, 1, E / 4], float32
    cos = angle.cos()
    sin = angle.sin()
    turned = (
        left * cos - right * sin,
        right * cos + left * sin,
        still,
    )
    return torch.cat(turned, dim=-1).to(x.dtype)


class Indexer(nn.Module):
    """The lightning indexer's parameters: J query heads, one shared key head, J weights.

    Its input is detached (model.py), so no other loss reaches it; in RL nothing trains it.
    """

    def __init__(self, width: int, heads: int, head_width: int):
        super().__init__()
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key = nn.Linear(width, head_width, bias=False)
        self.key_norm = nn.LayerNorm(head_width, eps=1e-6)
        self.weight = nn.Linear(width, heads, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple:
        """hidden [N, width], positions [N] -> q_index [N, J, E], k_index [N, E], weights [N, J].

        The weights are scaled by J^-1/2 (a sum over heads) and E^-1/2 (a product of width E).
        """
        k = self.key_norm(self.key(hidden))[:, None]  # [N, 1, E]
        q = self.query(hidden).unflatten(1, (-1, k.shape[2]))  # [N, J, E]
        both = rotary(torch.cat([q, k], dim=1), positions)
        weights = self.weight(hidden) * self.query.out_features**-0.5
        return both[:, :-1], both[:, -1], weights
