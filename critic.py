"""critic.py: a value head on the policy's hidden states, for `--advantage gae`.

It says what reward is still to come after a token, so one answer to a prompt is enough
(`--group-size 1`). The policy's gradient does not reach it, nor its gradient the policy.
Left out: the estimator itself (`skip_observation_gae` in losses.py).

Axes: M generated tokens of a micro-batch · d model width
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import losses
from model import GPT
from runtime.config import Config

LAMBDA = 1.0  # of GAE: rewards only; with less, the critic is trusted more
LEARNING_RATE, UPDATES = 3e-3, 2  # of the critic; its updates a step


@dataclass
class Critic:
    """What the policy's hidden states promise: two layers, with an optimizer of their own."""

    net: nn.Module
    optimizer: torch.optim.Optimizer


def make_critic(config: Config, model: GPT) -> Critic:
    """A value head; at first it says the same, near 0, of every token."""
    d, device = model.config.width, model.flat.device
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        net = nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, 1)).to(device)
    nn.init.zeros_(net[2].weight)
    return Critic(net, torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=0.0))


def estimate_advantages(critic: Critic, batch: list, hidden: Tensor) -> tuple:
    """Advantages [M] of the generated tokens by skip-observation GAE; and what the critic learns
    from: hidden states and what followed.

    A turn's reward comes with its last token. hidden [M, d], without gradient: the policy is not
    taught what pleases its critic.
    """
    rewards, lengths = [], [t.generated for t, _ in batch]
    for t, _ in batch:
        for (start, stop), reward in zip(t.turns, t.turn_rewards, strict=True):
            rewards += [0.0] * (stop - start)
            if stop > start:
                rewards[-1] = reward
    with torch.no_grad():
        values = critic.net(hidden.float())[:, 0].cpu()  # [M]
    rewards = torch.tensor(rewards)
    advantages = losses.skip_observation_gae(rewards, values, lengths, LAMBDA)
    return advantages, (hidden.float(), (advantages + values).to(hidden.device))


def update_critic(critic: Critic, lessons: list) -> float:
    """A few steps of the critic towards what it has seen; returns its loss before them."""
    hidden, targets = (torch.cat(part) for part in zip(*lessons, strict=True))
    first = 0.0
    for update in range(UPDATES):
        loss = (critic.net(hidden)[:, 0] - targets).square().mean()
        critic.optimizer.zero_grad()
        loss.backward()
        critic.optimizer.step()
        first = first if update else float(loss.detach())
    return first
