"""methods/turns.py: `--credit turn`: each turn of an episode is credited with what came after it.

Axes: G groups · n answers of a group · T turns
"""

import torch
from torch import nn

from buffer import repaired
from learner import GroupMethod, pairs_of
from losses import group_advantages


class TurnCredit(GroupMethod):
    """Advantages of single turns inside a group."""

    def samples(self, learner, groups: list, config) -> tuple:
        trajectories = repaired(groups)
        turns = torch.tensor([len(t.turns) for t in trajectories])
        rewards = [torch.tensor(t.turn_rewards) for t in trajectories]
        rewards.append(torch.zeros(int(turns.max())))  # this long, also where rewards are missing
        padded = nn.utils.rnn.pad_sequence(rewards, batch_first=True)[:-1]  # [G n, T]
        present = torch.arange(padded.shape[1]) < turns[:, None]
        by_turn = (x.view(len(groups), -1, padded.shape[1]) for x in (padded, present))
        advantages, dead = turn_advantages(*by_turn, config.advantage)
        return pairs_of(trajectories, advantages.flatten(0, 1)), dead


def turn_advantages(
    turn_rewards,  # [G, n, T]
    present,  # bool [G, n, T]
    name: str,
) -> tuple:
    """Credit a turn: its reward-to-go relative to the group -> (advantages [G, n, T], dead [G]).

    turn_rewards float [G, n, T] (0: none), `present` bool [G, n, T] (the sample has this turn).
    `group_advantages` of R_t + R_t+1 + ... (gamma = 1) among the samples that have
    turn t: one alone there gets 0, so do equal ones; dead is a group in which every turn is.
    "Turn-level credit" has several meanings. GTPO (arXiv 2511.14846): normalized returns-to-go, as
    here, but discounted, and of shaped rewards. MT-GRPO (arXiv 2505.11821, v1): the normalized
    outcome, and in the first turn its own normalized reward, too. GiGPO (arXiv 2505.10978): returns
    compared among samples in the same state, and the episode's advantage is added; here only the
    turn is the same, so what differs between states stays in as noise.
    AssertionError: see `group_advantages`.
    """
    size, turns = turn_rewards.shape[1:]
    returns = returns_to_go(turn_rewards.masked_fill(~present, 0.0))
    rows = [x.transpose(1, 2).reshape(-1, size) for x in (returns, present)]  # [G T, n]
    advantages, dead = group_advantages(rows[0], name, rows[1])
    return advantages.view(-1, turns, size).transpose(1, 2), dead.view(-1, turns).all(1)


def returns_to_go(rewards):
    """R_t + R_t+1 + ... over the last axis; in double: 0.1 + 0.5 + 0.1 and 0.7 are the same."""
    return rewards.double().flip(-1).cumsum(-1).flip(-1).to(rewards)


METHOD = TurnCredit
