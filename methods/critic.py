"""methods/critic.py: `--advantage gae`: a value head on the policy's hidden states.

It says what reward is still to come after a token, so one answer to a prompt is enough
(`--group-size 1`). The policy's gradient does not reach it, nor its gradient the policy.

Axes: M generated tokens of a micro-batch (N of the estimator) · d model width
"""

import itertools

import torch
from torch import Tensor, nn

from buffer import repaired
from learner import GroupMethod, pairs_of

LAMBDA = 1.0  # of GAE: rewards only; with less, the critic is trusted more
LEARNING_RATE, UPDATES = 3e-3, 2  # of the critic; its updates a step
SMALLEST_SPREAD = 0.1  # advantages are divided by the std of rewards, or this if larger


class Critic(GroupMethod):
    """A value head with an optimizer of its own; at first it says the same, near 0, of all."""

    def __init__(self, config, model):
        d, device = model.config.width, model.flat.device
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            net = nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, 1))
        nn.init.zeros_(net[2].weight)
        self.net = net.to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), LEARNING_RATE, weight_decay=0.0)

    def samples(self, learner, groups: list, config) -> tuple:
        """What stands for advantages here is a factor on them: 1 / the spread of all rewards."""
        trajectories = repaired(groups)
        rewards = torch.tensor([t.reward for t in trajectories]).float()
        spread = float(rewards.std()) if len(rewards) > 1 else 0.0
        factor = 1 / max(SMALLEST_SPREAD, spread)
        factors = torch.full((len(trajectories), 1), factor)
        return pairs_of(trajectories, factors), torch.zeros(len(groups), dtype=torch.bool)

    def advantages(self, batch: list, tokens, hidden: Tensor) -> tuple:
        """Advantages [M] by skip-observation GAE, and a lesson: hidden states, what followed.

        A turn's reward comes with its last token. hidden [M, d] without gradient: the policy is not
        taught what pleases its critic.
        """
        rewards, hidden = [], hidden.detach().float()
        for t, _ in batch:
            for (start, stop), reward in zip(t.turns, t.turn_rewards, strict=True):
                rewards += [0.0] * (stop - start)
                if stop > start:
                    rewards[-1] = reward
        with torch.no_grad():
            values = self.net(hidden)[:, 0].cpu()  # [M]
        lengths = [t.generated for t, _ in batch]
        estimates = skip_observation_gae(torch.tensor(rewards), values, lengths, LAMBDA)
        return tokens.advantages * estimates.to(hidden), (hidden.cpu(), estimates + values)

    def learn(self, lessons: list) -> dict:
        """A few steps of the critic towards what it has seen; its loss before them."""
        place = self.net[0].weight
        hidden, targets = (torch.cat(part).to(place) for part in zip(*lessons, strict=True))
        losses = []
        for _ in range(UPDATES):
            loss = (self.net(hidden)[:, 0] - targets).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return {"critic_loss": losses[0]}

    def state(self) -> dict:
        return {"net": self.net.state_dict(), "moments": self.optimizer.state_dict()["state"]}

    def load(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        whole = self.optimizer.state_dict() | {"state": state["moments"]}
        self.optimizer.load_state_dict(whole)


def skip_observation_gae(
    rewards,  # [N]
    values,  # [N]
    lengths: list,
    lam: float,
    gamma: float = 1.0,
) -> Tensor:
    """Generalized advantage estimates [N] of generated tokens, as if nothing stood between them.

    delta_j = r_j + gamma V_j+1 - V_j and A_j = delta_j + gamma lam A_j+1: Schulman et al. 2015
    (arXiv 1506.02438) equation 16. rewards and values float [N] of S sequences end to end, each as
    long as `lengths` says; after a sequence V and A are 0. Observations are not in the list, so
    after the last token of a turn comes the first of the next one: the skip-observation GAE of SAO
    (arXiv 2607.07508). No gradient. AssertionError when lengths, rewards and values do not agree.
    """
    assert len(rewards) == len(values) == sum(lengths), (len(rewards), len(values), lengths)
    ends = set(itertools.accumulate(lengths))
    earned, worth = rewards.tolist(), values.tolist()
    estimates = []
    following = later = 0.0
    for j in reversed(range(len(earned))):
        if j + 1 in ends:
            following = later = 0.0
        later = earned[j] + gamma * following - worth[j] + gamma * lam * later
        following = worth[j]
        estimates.append(later)
    return values.new_tensor(estimates[::-1])


METHOD = Critic
