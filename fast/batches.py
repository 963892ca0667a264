"""batches.py: how the samples of a step are put into micro-batches and dealt to several learners.

Attention computes a grid, as wide as the longest sequence in it. Sorted by length, 256 log-normal
episodes (19,181 tokens) fill 24,908 cells; as they come, 54,764.
Left out: what the samples are (learner.py). Lengths in, indices out.
"""


def pack(
    lengths: list,
    token_budget: int,
    learners: int = 1,
) -> list:
    """Split sequences into micro-batches of at most `token_budget` tokens; returns their indices.

    What counts is the padded grid of attention, as wide as the longest sequence: sorted by length,
    neighbours waste little of it. A sequence longer than the budget gets a micro-batch of its own.
    Several learners share them: none is larger than an equal share of all tokens.
    """
    if learners > 1:
        token_budget = min(token_budget, max(1, sum(lengths) // learners))
    batches = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):  # stable: deterministic
        if not batches or (len(batches[-1]) + 1) * lengths[i] > token_budget:
            batches.append([])
        batches[-1].append(i)
    return batches


def deal(batches: list, lengths: list, learners: int, linear: float) -> list:
    """Micro-batches for each learner, in about equal shares of the cost.

    A sequence of T tokens costs T + T^2 / linear; `linear` is the length from which on attention
    costs more than matrix products. The dearest goes first, to whoever has least; ties by rank.
    """
    costs = [sum(lengths[i] + lengths[i] ** 2 / linear for i in batch) for batch in batches]
    shares, load = [[] for _ in range(learners)], [0.0] * learners
    for number in sorted(range(len(batches)), key=costs.__getitem__, reverse=True):
        rank = load.index(min(load))
        shares[rank].append(number)
        load[rank] += costs[number]
    return [[batches[number] for number in sorted(share)] for share in shares]
