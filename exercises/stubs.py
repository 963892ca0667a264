"""stubs.py: the exercises, one function each; README.md beside this file has theory and hints.

Copy this file to `exercises/mine.py`, replace one `raise` after the other, and ask the project's
own tests: `IMPL=exercises.mine pytest -m ex06 -x`.

A function is given CPU tensors unless its docstring says otherwise, must not change its arguments
(`swap_weights` is the exception), and returns new tensors of the dtype of its inputs. Everything
that it needs to know is said here.
"""

import numpy as np
import torch  # noqa: F401 (most exercises need it)
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Causal softmax attention inside each of several packed sequences.

    q float32 [N, Hq, D]; k and v [N, Hkv, D]; N = sum(lengths). Rows 0 .. lengths[0] - 1 are the
    first sequence, the next lengths[1] rows the second, and so on -> [N, Hq, D].
    A token attends to itself and to earlier tokens of its own sequence, with scores
    q . k / sqrt(D). Hq = G * Hkv, and query head h reads key head h // G.
    """
    raise NotImplementedError("ex01: causal attention over packed sequences")


def index_scores(q_index: Tensor, k_index: Tensor, weights: Tensor) -> Tensor:
    """Scores of the lightning indexer, for one sequence of N tokens.

    q_index float32 [N, J, E] (J small heads), k_index [N, E] (one key head, shared by all of
    them), weights [N, J] of either sign (any scaling is in the weights already) -> [N, N]:
    I[t, s] = sum over j of weights[t, j] * ReLU(q_index[t, j] . k_index[s])   for s < t,
    and -inf for s >= t: the future is no candidate, and the own token is selected without a score.
    """
    raise NotImplementedError("ex02: the index score")


def select(scores: Tensor, past: Tensor, top_k: int) -> Tensor:
    """Each query's own chunk, then the best chunks of its past: the same on every machine.

    scores float32 [N, K], finite; past int64 [N], 0 <= past[n] < K -> int64 [N, min(top_k, K)].
    Query n lies in chunk past[n]; candidates are the chunks before it, 0 .. past[n] - 1, and
    scores of other chunks mean nothing. Row n of the result holds past[n] first (it counts as one
    of the top_k), then candidates by score, highest first, of equal scores the lowest id first
    (0.0 and -0.0 are equal), and -1 where there are no more candidates.
    """
    raise NotImplementedError("ex03: deterministic top-k with ties")


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, chunk_size: int) -> Tensor:
    """Attention of every query to the keys of its selected chunks only, for one sequence.

    q, k, v float32 [N, H, D]; selected int64 [N, S] holds chunk ids, the same for all heads:
    unique in a row, -1 = none, anywhere in the row. Chunk c is the rows c * chunk_size and the
    chunk_size - 1 that follow, as far as they exist (the last chunk may be shorter) -> [N, H, D].
    Query n attends to rows m <= n of its chunks, with scores q . k / sqrt(D). A query without a
    chunk gets 0. Rows m > n may hold NaN, in k and in v: the result of query n must not notice.
    """
    raise NotImplementedError("ex04: sparse attention that equals dense when everything fits")


def group_advantages(
    rewards: Tensor, name: str, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How much better than its group an answer was.

    rewards float32 [G, n], n answers to each of G prompts; valid bool [G, n], default all True
    -> (advantages float32 [G, n], dead bool [G]). With mean and std over the VALID answers of the
    group (m of them), a valid answer gets
        name "grpo"   (R - mean) / (std + 1e-6), std with m - 1 in its denominator
        name "mean"   R - mean
        name "rloo"   R - mean of the other valid answers
    and an answer that is not valid gets 0; its reward may be NaN. A group with fewer than two
    valid answers, or whose valid rewards are all equal (compare them exactly), is dead: all 0.
    """
    raise NotImplementedError("ex05: group advantages and dead groups")


def token_mean(values: Tensor, mask: Tensor, count: float) -> Tensor:
    """This micro-batch's share of the mean of `values` over all generated tokens of a step.

    values float32 [N], any number of packed sequences laid end to end; mask bool [N], True where
    the policy generated the token; count: generated tokens of the WHOLE step, of which this is
    one micro-batch -> scalar, differentiable. The shares of all micro-batches add up to the mean.
    values may be NaN or infinite outside the mask: neither the result nor a gradient may notice.
    Raises AssertionError when values and mask differ in shape or count is not above 0.
    """
    raise NotImplementedError("ex06: the masked mean and its denominator")


def tis(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    count: float,
    low: float,
    high: float,
    cap: float,
) -> Tensor:
    """The loss of decoupled PPO with a truncated importance weight.

    All float32 [N] but mask, bool [N]: log pi, log pi_p and log mu of the tokens, and A. With
    w = pi_p / mu, r = pi / pi_p:
        loss = -(1 / count) * sum over the mask of
               min(w, cap) * min(r * A, clip(r, 1 - low, 1 + high) * A)
    -> scalar. Gradients flow through `logprobs` only. Values outside the mask may be NaN.
    """
    raise NotImplementedError("ex07: a truncated importance weight")


def double_sided(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    count: float,
    low: float,
    high: float,
) -> Tensor:
    """The double-sided objective: a token too far from the policy that sampled it teaches nothing.

    All float32 [N] but mask, bool [N]: log pi, log mu of the tokens, and A. With rho = pi / mu:
        f(rho) = rho if 1 - low < rho < 1 + high (both strict) else 0, a constant (no gradient)
        loss   = -(1 / count) * sum over the mask of f(rho) * A * log pi
    -> scalar, whatever the sign of A. Values outside the mask may be NaN, and log-ratios as large
    as 200: neither the loss nor its gradient may become NaN or infinite.
    """
    raise NotImplementedError("ex08: a double-sided correction")


def damp(window: list[float], kl: float) -> tuple[list[float], float, float]:
    """One step of the KL-window damper: (window with kl, learning-rate scale, reference scale).

    window: the KL values so far, newest last, at most 1000. The new window is a new list with kl
    at its end and the 1000 newest values. While the mean of the new window is above 0.15
    (strictly), the scales are 0.6 and 2.0, otherwise 1.0 and 1.0. The mean of any
    number of values of exactly 0.15 is not above 0.15, whatever rounding says.
    Raises AssertionError when kl is not finite.
    """
    raise NotImplementedError("ex09: the KL-window damper")


def draw(
    logits: Tensor, keys: np.ndarray, positions: np.ndarray, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sample one token a row, with noise that is a pure function of (key, position).

    logits float32 [B, V]; keys int64 [B], 0 <= key < 2^62, names the trajectory; positions int64
    [B] -> (chosen int64 [B], log-probs float32 [B]). Token i is chosen with probability
    softmax(logits / temperature)[i], over keys as over positions, and row b depends on logits[b],
    keys[b], positions[b] and nothing else: no generator state, no neighbours, no row number.
    Different (key, position) pairs have independent noise. The log-probs are those of the
    distribution that was sampled from. Temperature 0: the most likely token, and its
    log-probability under softmax(logits). Any good hash will do.
    """
    raise NotImplementedError("ex10: counter-based sampling")


def staleness(versions: np.ndarray, loss_mask: np.ndarray, version: int) -> int:
    """By how many versions the oldest generated token of a trajectory is out of date.

    versions int32 [T]: the policy version that produced each token, -1 for tokens that the policy
    did not generate; loss_mask bool [T]: True where the policy generated. `version`: the version
    that the learner has now, before the step that trains the trajectory. A token of that version
    has staleness 0; never negative; 0 when nothing was generated. A token with the mask False
    does not count, whatever its version says.
    """
    raise NotImplementedError("ex11: staleness from the oldest token")


def may_admit(
    starts: list[int], version: int, start: int, groups_per_step: int, max_staleness: int
) -> bool:
    """Whether one more group may be admitted so that none is ever trained too late.

    starts: start versions of all outstanding groups (admitted, not trained yet), in any order;
    version: the learner's; start: that of the new group, version - max_staleness <= start <=
    version. With B = groups_per_step, eta = max_staleness and N(<= s) the number of outstanding
    groups that started at s or before: True if and only if
        N(<= s) + 1 <= (s + eta - version + 1) * B     for every s with start <= s <= version.
    """
    raise NotImplementedError("ex12: admission")


def next_batch(
    completed: list[tuple[int, int]],
    running: list[int],
    version: int,
    groups_per_step: int,
    max_staleness: int,
) -> list[int] | None:
    """Which complete groups to train now, so that none is ever too old and none is dropped.

    completed: (group id, start version) of the complete groups in order of completion; running:
    start versions of groups that are still being made -> B ids, ascending, or None: wait.
    With B = groups_per_step, eta = max_staleness, v = version, a batch may be trained if what it
    leaves behind, complete or running, still meets every deadline:
        N_left(<= s) <= (s + eta - v) * B     for every s with v - eta <= s <= v
    where N_left(<= s) counts groups left behind that started at s or before. Try the B groups
    that completed first; if they do not meet it, the B complete groups with the oldest start (of
    equal starts the one that completed first); if these do not either, or fewer than B groups are
    complete, None.
    """
    raise NotImplementedError("ex13: deadline-aware batching")


def resume(
    in_flight: list[int],
    completed: dict[int, int],
    next_group: int,
    version: int,
    groups_per_step: int,
    max_staleness: int,
) -> tuple[dict[int, int], list[int], int]:
    """What is outstanding after a resume, what still waits, and where new prompts go on.

    From a checkpoint at `version`: in_flight, ids of all groups that were admitted and not trained,
    in order; completed: those of them whose episodes are in the checkpoint, id -> start version;
    next_group: the id of the next new prompt -> (outstanding: id -> start version; waiting: ids
    that wait to be issued again, in order; the new next_group).
    Completed groups are outstanding with the start they had: their tokens are that old. All others
    in flight are made again from the beginning: they start at `version`. At most
    (max_staleness + 1) * groups_per_step groups may be outstanding. Completed ones are there first
    (they always fit); then those in flight that are not complete, in order, as long as there is
    room, the rest of them is `waiting`; then, if nobody waits, new prompts next_group,
    next_group + 1 ..., which start at `version`, until there is no room.
    """
    raise NotImplementedError("ex14: resume without losing a prompt")


def swap_weights(
    model, cache, flat: Tensor, tokens: np.ndarray, cached: np.ndarray, running
) -> None:
    """Adopt new weights between two tokens and rebuild what the old ones have left in the cache.

    model: a GPT; `model.flat` [P] holds every parameter, and flat [P] is what to write into it
    (in place: the parameters are views of it). cache: keys and values of B slots. tokens int32
    [B, T]; cached int64 [B]: the first cached[b] tokens of slot b have been through the model, so
    the cache has their keys and values; running bool [B]: False = the slot is empty. tokens may
    know more than cached[b] tokens of a slot: the next one is fed by the next step, not here.
    Afterwards the cache holds, for each running slot, what the NEW weights give for the first
    cached[b] tokens, and other slots are as they were. `prefill(model, cache, slots, sequences)`,
    to be imported from the project's cache.py, computes the keys and values of whole sequences, a
    list of n 1-D integer arrays that are not empty, and writes them into the slots, a list of n
    whole numbers.
    """
    raise NotImplementedError("ex15: a weight swap that leaves no stale keys")


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """Dot products of rows, by a Triton kernel: x, y [N, D] -> float32 [N].

    x and y are contiguous, float32 or float16, on the device the test chose (a CPU when the kernel
    is interpreted); D is a power of two from 16 to 128, N any number from 1. One program handles a
    block of rows. Products and sums are computed in float32.
    """
    raise NotImplementedError("ex17: a first Triton kernel")


def sparse_tile(
    q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, chunk_size: int, position: int
) -> Tensor:
    """Sparse attention of one decoded token, by a Triton kernel: one program, one chunk at a time.

    q float32 [16, D], 16 query heads that share one key head and one selection; k, v float32
    [M, D], key m has position m; chunks int64 [S], unique chunk ids or -1 = none, anywhere in the
    list; chunk c is the rows c * chunk_size and the chunk_size - 1 that follow -> [16, D].
    D is 16 or 32, chunk_size 16, M a multiple of it. The query stands at `position`: every head
    attends, with scores q . k / sqrt(D), to the keys at positions <= position in the chunks.
    At least one of them is selected. Scores may be in the hundreds: nothing may overflow.
    """
    raise NotImplementedError("ex18: one tile of sparse attention")


def turn_advantages(turn_rewards: Tensor, present: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """How much better an answer went on from a turn on than the others of its group did.

    turn_rewards float32 [G, n, T], what each turn of n answers to each of G prompts has earned;
    present bool [G, n, T], False where an answer has no such turn (it ended before, or failed);
    there the reward may be NaN -> (advantages float32 [G, n, T], dead bool [G]).
    The return of a turn is its reward and those of the later turns of its answer, added up in
    float64 and then rounded to float32: 0.1 + 0.2 and 0.3 + 0.0 are equal returns. For each prompt
    and each turn t, the answers that have turn t are a group of their own: their returns get the
    advantages that `group_advantages` gives rewards (the same three names; the others are not
    valid). A turn that an answer does not have gets 0. A prompt is dead if every turn is.
    `losses.group_advantages`, in the project, is finished: `import losses` and use it.
    """
    raise NotImplementedError("ex19: turn-level advantages")


def repair(failures: list[str | None]) -> list[int] | str:
    """What a group of answers is trained with when some environments have failed.

    failures[i]: why the environment of answer i failed, such as "env_timeout"; None: it is sound.
    The list is not empty. If more than half of the answers are sound: a list, as long as
    `failures`, of the answers to train, by number: all sound ones in order, then the same again,
    from the first on, until the list is full. Otherwise the group is discarded, and the result is
    the reason: the failure that most of them had, of equally many the one that comes first.
    """
    raise NotImplementedError("ex20: group repair")


def skip_observation_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: list[int], gamma: float, lam: float
) -> Tensor:
    """Advantages of the generated tokens, as if no observation stood between them.

    rewards and values float32 [N], mask bool [N] (True: the policy generated the token), of whole
    sequences laid end to end: prompts, turns and observations; lengths: tokens of each sequence,
    N = sum(lengths). values[n] is what a critic expects from token n on, rewards[n] what token n
    has earned; outside the mask both may be NaN -> float32 [N], without gradient.
    With j+1 the next GENERATED token of the same sequence, however many observations lie between:
        delta_j = r_j + gamma * V_j+1 - V_j
        A_j     = delta_j + gamma * lam * A_j+1
    Behind the last generated token of a sequence V and A are 0. Outside the mask the result is 0.
    """
    raise NotImplementedError("ex21: skip-observation GAE")
