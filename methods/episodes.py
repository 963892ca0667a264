"""methods/episodes.py: what a policy says of whole episodes, beside the gradient of a step.

Axes: M generated tokens of an episode
"""

import torch

from fast.batches import pack
from logprobs import token_logprobs
from model import GPT
from runtime.config import Config


@torch.no_grad()
def policy_logprobs(model: GPT, trajectories: list, who, config: Config) -> list:
    """What a policy says of whole episodes: log-probs of the generated tokens of each [M]; on the
    CPU, no gradient. who: see `token_logprobs`."""
    results = [torch.empty(0)] * len(trajectories)
    generated = [i for i, t in enumerate(trajectories) if t.generated]
    lengths = [len(trajectories[i].tokens) for i in generated]
    for batch in pack(lengths, config.token_budget):
        indices = [generated[j] for j in batch]
        pairs = [(trajectories[i], 0.0) for i in indices]
        logprobs, *_ = token_logprobs(model, pairs, who, config)
        pieces = logprobs.float().cpu().split([t.generated for t, _ in pairs])
        for i, piece in zip(indices, pieces, strict=True):
            results[i] = piece
    return results
