"""methods/preferences.py: `--objective dpo`: of each group the best and the worst answer are
trained, pushed apart (online DPO, arXiv 2402.04792, as asynchronous RLHF, 2410.18252, trains it).

The reference is the policy of up to 20 steps ago, as for all objectives (learner.py), and not the
first one as in these papers: BETA holds the policy near to that.
"""

import torch
from torch import Tensor

from buffer import repaired
from learner import GroupMethod, pairs_of
from methods.episodes import policy_logprobs

BETA = 0.1  # how near to the reference policy: the usual value (arXiv 2305.18290)


class Preferences(GroupMethod):
    """Pairs of answers, with advantages that make `reinforce` the gradient of DPO."""

    def samples(self, learner, groups: list, config) -> tuple:
        """Losses are divided by tokens later, so here it is multiplied: a mean over pairs."""
        pairs, dead = [], []
        for group in groups:
            sound = sorted([t for t in repaired([group]) if t.generated], key=lambda t: -t.reward)
            dead.append(not sound or sound[0].reward == sound[-1].reward)
            pairs += [] if dead[-1] else [sound[0], sound[-1]]
        sums = []  # log-probs of whole answers, by the policy and by the reference
        for model in (learner.model, learner.reference):
            logprobs = policy_logprobs(model, pairs, learner, config)
            sums.append(torch.tensor([float(x.sum()) for x in logprobs]))
        gaps = sums[0] - sums[1]  # [2 pairs]
        margins = gaps[::2] - gaps[1::2]  # [pairs]
        push = preference_advantages(margins, BETA).T.reshape(-1, 1).double()  # [2 pairs, 1]
        scale = sum(t.generated for t in pairs) / max(1, len(margins))
        return pairs_of(pairs, push * scale), torch.tensor(dead)


def preference_advantages(margins: Tensor, beta: float) -> Tensor:
    """What makes `reinforce` on pairs the gradient of online DPO: [pairs] -> [2, pairs].

    L = -log sigmoid(beta m), m = log(pi / pi_ref) of the better answer minus that of the worse
    (Rafailov et al. 2023, arXiv 2305.18290, equation 7). So dL / d log pi is -beta sigmoid(-beta m)
    for the better one, and the opposite for the worse.
    """
    push = beta * torch.sigmoid(-beta * margins)
    return torch.stack([push, -push])


METHOD = Preferences
