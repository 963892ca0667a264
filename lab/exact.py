"""lab.py: the exact laboratory: tasks so small that every response is enumerated.

Sixty-four responses are all there is, spelled as one token of 64 or as three tokens of 4. The true
policy gradient, the true KL and the true optimum are finite sums, so the bias and the variance of
every objective of `losses.py` are exact numbers; a sampled trace is held against them. What the
pipeline does to the data, before any objective sees them, is measured in lab_pipeline.py.
`python lab.py` (one thread) writes results/lab.json and results/lab_*.png; docs/lab.md reads them.
Left out: optimizer state, clipping of the gradient norm, function approximation (the policy is a
table of logits), rewards that depend on time.

Staleness here: optimizer steps between the policy that sampled the trace and the one trained on it.
Axes:   R responses · T tokens of a response · V vocabulary · P prefixes
        D = P V entries of the table of logits, which is `theta` [P, V]
Claim:  (name, values [R], their chances [R], truth, whether theory says: unbiased)
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from tqdm import tqdm

import losses
from lab.exact_pipeline import draw as draw_pipeline
from lab.exact_pipeline import drop_part, swap_part
from lab.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, draw_panels, save_result
from runtime.config import flag, run_main
from runtime.devices import describe_machine

STALENESS, STEP = range(9), 0.3  # gradient ascent on the enumerated objective, steps of one size


JUDGED = (0, 2, 8)  # staleness at which a sampled trace is held against theory


CORRECTIONS = {"opsm": "decoupled_ppo", "vtrace": "reinforce", "sequence_is": "reinforce"}


METHODS = (*losses.OBJECTIVES, *CORRECTIONS)


@dataclass
class Settings:
    """What may be chosen; fields are flags."""

    seed: int = flag(0, "of policies and samples", 0, 2**31 - 1)
    samples: int = flag(100_000, "of each trace", 100, 10**7)


class Task(NamedTuple):
    """Every response of a task, in lexicographic order."""

    tokens: Tensor  # [R, T] int64
    prefix: Tensor  # [R, T] int64: row of theta that predicts each token
    rewards: Tensor  # [R] float64
    shape: tuple[int, int]  # (P, V) of theta


def make_task(vocab: int, length: int) -> Task:
    """All V^T responses; the rewards belong to their numbers, so 64^1 and 4^3 share one table."""
    number = torch.arange(vocab**length)
    places = vocab ** torch.arange(length - 1, -1, -1)
    starts = (vocab ** torch.arange(length) - 1) // (vocab - 1)  # rows of shorter prefixes
    a, b, c = number // 16 % 4, number // 4 % 4, number % 4
    # most of it is for a last digit that fits the first two: credit must pass through prefixes
    rewards = 0.2 * (a == 2) + 0.2 * (b > a) + 0.6 * (c == (a + b) % 4)
    prefix = starts + number[:, None] // (places * vocab)
    shape = (int(starts[-1]) + vocab ** (length - 1), vocab)
    return Task(number[:, None] // places % vocab, prefix, rewards.double(), shape)


TASKS = {"one token": make_task(64, 1), "three tokens": make_task(4, 3)}


def logprobs_of(theta: Tensor, task: Task) -> Tensor:
    """Log-probs [R, T] of every token of every response under the table theta [P, V]."""
    return torch.log_softmax(theta, -1)[task.prefix, task.tokens]


def scores_of(theta: Tensor, task: Task) -> Tensor:
    """d log pi(token) / d theta, [R, T, D]: one-hot minus softmax, in the row of the prefix."""
    rows = one_hot(task.tokens, task.shape[1]) - torch.softmax(theta, -1)[task.prefix]  # [R, T, V]
    where = one_hot(task.prefix, task.shape[0])  # [R, T, P]
    return (where[..., None] * rows[:, :, None]).flatten(2)


def true_gradient(theta: Tensor, task: Task) -> tuple[float, Tensor]:
    """J = sum over all responses of pi(y) R(y), and its gradient [D] (no estimate anywhere)."""
    theta = theta.detach().requires_grad_()
    value = logprobs_of(theta, task).sum(1).exp() @ task.rewards
    return value.item(), torch.autograd.grad(value, theta)[0].flatten()


def policies(task: Task, seed: int) -> list[Tensor]:
    """The policy after 0, 1, ... 8 steps of exact gradient ascent: theta [P, V] each."""
    generator = torch.Generator().manual_seed(seed)
    chain = [0.5 * torch.randn(task.shape, generator=generator, dtype=torch.float64)]
    for _ in STALENESS[1:]:
        slope = true_gradient(chain[-1], task)[1].view(task.shape)
        chain.append(chain[-1] + STEP * slope / slope.norm())
    return chain


def prefix_values(theta: Tensor, task: Task) -> Tensor:
    """Expected reward behind every prefix [R, T], before its token is drawn: the true critic."""
    mu = logprobs_of(theta, task).sum(1).exp()
    visits = one_hot(task.prefix, task.shape[0]).sum(1).double()  # [R, P]
    return (((mu * task.rewards) @ visits) / (mu @ visits))[task.prefix]


def vtrace(log_ratio: Tensor, values: Tensor, rewards: Tensor, cap: float = 1.0) -> tuple:
    """V-trace targets v, weights rho and advantages r + v' - V, each [R, T]; reward at the end.

    log(pi / mu) [R, T], critic's values V [R, T], rewards [R]; no discount. Espeholt et al. 2018
    (IMPALA, arXiv 1802.01561) equation 1 and section 4.2; rho and c have one cap here, which makes
    their recursion v = V + rho (r + v' - V).
    """
    rho, target, targets, advantages = log_ratio.exp().clamp(max=cap), rewards, [], []
    for weight, value in zip(rho.T.flip(0), values.T.flip(0), strict=True):  # last token first
        advantages.insert(0, target - value)
        target = value + weight * advantages[0]
        targets.insert(0, target)
    return torch.stack(targets, 1), rho, torch.stack(advantages, 1)


def loss_of(method: str, new: Tensor, old: Tensor, rewards: Tensor, values: Tensor) -> tuple:
    """Loss of R responses by any of METHODS, advantages [R, T], share of tokens that were touched.

    Log-probs now and as recorded [R, T], rewards [R], the critic of the behaviour policy [R, T].
    Touched is what a correction clipped, capped or dropped. One update a step: pi_p is the policy
    of this very forward pass. The denominator is R, not R T, as in the gradient of J.
    """
    drift, mask = (new - old).detach(), torch.ones(new.numel(), dtype=torch.bool)
    sequence = torch.arange(len(new)).repeat_interleave(new.shape[1])
    advantages = (rewards - values[:, 0])[:, None].expand(new.shape)
    weight, touched = torch.ones_like(drift), 0.0
    if method == "sequence_is":  # the whole response's ratio: unbiased at every staleness
        weight = drift.sum(1, keepdim=True).exp().expand(new.shape)
    elif method == "vtrace":
        _, weight, advantages = vtrace(drift, values, rewards)
        touched = float((weight < drift.exp()).double().mean())
    flat = [x.reshape(-1) for x in (new, new.detach(), old, weight * advantages)]
    constants = losses.Settings()
    if method == "opsm":
        mask = losses.opsm_mask(flat[2], flat[0], flat[3], mask, sequence, constants.opsm_delta)
    objective = losses.OBJECTIVES[CORRECTIONS.get(method, method)]
    loss, sums = objective(*flat, mask, sequence, len(new), constants)
    touched += float(sum(sums.values()) + (~mask).sum()) / mask.numel()
    return loss, advantages, touched


def examine(method: str, task: Task, theta: Tensor, behaviour: Tensor) -> tuple[Tensor, dict]:
    """The gradient of every response [R, D], and what it is worth: no sampling.

    In units of the length of the truth: `bias`, |expectation - truth|; `spread`, the standard
    deviation of one response; `share`, the expectation projected on the truth. `ess`: effective
    sample size of the token weights, as a share of the tokens. `touched`: see `loss_of`.
    """
    new, old = logprobs_of(theta, task).requires_grad_(), logprobs_of(behaviour, task)
    values, truth = prefix_values(behaviour, task), true_gradient(theta, task)[1]
    loss, advantages, touched = loss_of(method, new, old, task.rewards, values)
    gains = -len(new) * torch.autograd.grad(loss, new)[0]  # [R, T]: d gain / d log pi
    gradients, mu = (gains[..., None] * scores_of(theta, task)).sum(1), old.sum(1).exp()
    mean, each = mu @ gradients, mu[:, None] / new.shape[1]
    weights = gains / advantages
    facts = {
        "bias": (mean - truth).norm() / truth.norm(),
        "spread": (mu @ (gradients - mean).square().sum(1)).sqrt() / truth.norm(),
        "share": mean @ truth / truth.square().sum(),
        "ess": (each * weights).sum() ** 2 / (each * weights**2).sum().clamp_min(1e-300),
    }
    return gradients, {k: float(v) for k, v in facts.items()} | {"touched": touched}


def is_unbiased(method: str, length: int, staleness: int, touched: float) -> bool:
    """What theory says: a ratio per token corrects one token, a ratio per response all of it;
    whatever is clipped, capped or dropped costs that; on-policy there is nothing to correct."""
    if staleness == 0 or method == "sequence_is":
        return True
    return length == 1 and touched == 0 and method != "reinforce"


def gradient_claim(
    name: str, gradients: Tensor, chance: Tensor, truth: Tensor, unbiased: bool
) -> tuple:
    """Claim that the error of gradients [R, D] is 0, in units of the length of the truth [D].

    It is measured along the error that enumeration predicts, for a bias at right angles to the
    truth is a bias; along the truth if there is none.
    """
    along = truth if unbiased else chance @ gradients - truth
    return name, (gradients - truth) @ along / along.norm() / truth.norm(), chance, 0.0, unbiased


def verdict(claim: tuple, samples: int, seed: int) -> dict:
    """One line of the table: a claim against the mean of a sampled trace.

    It is as theory says when the mean is within 3 standard errors of the enumerated expectation,
    and of the truth exactly if unbiased; a bias below 6 standard errors is too small to demand.
    Equal chances and seed give an equal trace: one for all objectives, recorded once.
    """
    name, values, chance, truth, unbiased = claim
    generator = torch.Generator().manual_seed(seed)
    draws = values[torch.multinomial(chance, samples, True, generator=generator)]
    estimate, predicted = float(draws.mean()), float(chance @ values)
    error = max(float(draws.std()) / samples**0.5, 1e-12)
    within = abs(estimate - truth) <= 3 * error
    hidden = not unbiased and abs(predicted - truth) < 6 * error
    ok = abs(estimate - predicted) <= 3 * error and (hidden or within == unbiased)
    row = dict(name=name, estimate=estimate, truth=truth, se=error, predicted=predicted)
    return row | dict(within=within, expected="unbiased" if unbiased else "biased", ok=ok)


def objectives_part(task: Task, seed: int) -> tuple[dict, list[tuple]]:
    """Bias, spread and effective sample size of every method against staleness."""
    length, chain = task.tokens.shape[1], policies(task, seed)
    mu, curves, claims = logprobs_of(chain[0], task).sum(1).exp(), {}, []
    for method in METHODS:
        found = [examine(method, task, theta, chain[0]) for theta in chain]
        curves[method] = [facts for _, facts in found]
        for s in JUDGED:
            gradients, facts = found[s]
            name = f"{method}, T = {length}, staleness {s}"
            truth = true_gradient(chain[s], task)[1]
            unbiased = is_unbiased(method, length, s, facts["touched"])
            claims.append(gradient_claim(name, gradients, mu, truth, unbiased))
    return curves, claims


def advantages_part(task: Task, seed: int) -> tuple[dict, list[tuple]]:
    """Gradients with group advantages, on-policy, over all R^3 groups: share and direction."""
    theta, curves, claims = policies(task, seed)[2], {}, []
    truth, scores = true_gradient(theta, task)[1], scores_of(theta, task).sum(1)
    mu, along = logprobs_of(theta, task).sum(1).exp(), scores @ truth / truth.square().sum()
    groups = torch.cartesian_prod(*[torch.arange(len(mu))] * 3)  # [R^3, 3]
    chance = mu[groups].prod(1)
    for kind in losses.ADVANTAGES:
        advantages = losses.group_advantages(task.rewards[groups], kind)[0]
        values = (advantages * along[groups]).mean(1)
        # all members are alike: the first one's advantage, by its response, gives the direction
        weights = torch.zeros_like(mu).index_add(0, groups[:, 0], chance * advantages[:, 0])
        mean, share = weights @ scores, float(chance @ values)
        curves[kind] = dict(share=share, cosine=float(mean @ truth / mean.norm() / truth.norm()))
        claims.append((f"advantage {kind}, groups of 3", values, chance, 1.0, kind == "rloo"))
    return curves, claims


# what theory says: tokens of a response up to which value and gradient of an estimator are right
KL_RIGHT = {"k1": (3, 0), "k2": (0, 1), "k3": (3, 0), "unbiased_k3": (1, 1)}


def kl_part(task: Task, seed: int) -> tuple[dict, list[tuple]]:
    """Values and gradients of the KL estimators against KL(pi || pi_ref), pi_ref = step 0.

    k1, k2, k3 see samples of pi; unbiased_k3 sees samples of a policy two steps older.
    """
    length, chain = task.tokens.shape[1], [p.requires_grad_() for p in policies(task, seed)]
    logprobs, curves, claims = [logprobs_of(theta, task) for theta in chain], {}, []
    for name, (right_value, right_slope) in KL_RIGHT.items():
        curves[name] = []
        for s in STALENESS[1:]:
            weighted = name == "unbiased_k3"
            new, old = logprobs[s], logprobs[max(s - 2, 0) if weighted else s].detach()
            reference, chance = logprobs[0].detach(), old.sum(1).exp()
            kl = new.sum(1).exp() @ (new - reference).sum(1)
            (slope,) = torch.autograd.grad(kl, chain[s], retain_graph=True)
            values = getattr(losses, name)(new, reference, *[old] * weighted).sum(1)  # [R]
            (gains,) = torch.autograd.grad(values.sum(), new, retain_graph=True)
            gradients = (gains[..., None] * scores_of(chain[s].detach(), task)).sum(1)  # [R, D]
            values, slope, kl = values.detach(), slope.flatten(), kl.item()
            mean = chance @ values
            error = (chance @ gradients - slope).norm() / slope.norm()
            deviation = (chance @ (values - mean) ** 2).sqrt()
            facts = dict(kl=kl, value=mean, deviation=deviation, gradient_error=error)
            curves[name].append({k: float(v) for k, v in facts.items()})
        label = f"{name}, T = {length}"  # of the last staleness
        claims.append((f"value of {label}", values, chance, kl, length <= right_value))
        unbiased = length <= right_slope
        claims.append(gradient_claim(f"slope of {label}", gradients, chance, slope, unbiased))
    return curves, claims


# dashes are drawn over the full lines that they may coincide with
STYLES = dict(
    sequence_is=BLUE, vtrace=BLUE + "--", ppo=ORANGE, gspo=ORANGE + "--", double_sided=ORANGE + ":",
    decoupled_ppo=GREEN, tis=GREEN + "--", cispo="#000000:", opsm=PURPLE, icepop=PURPLE + "--",
    reinforce=GREY, k1=GREY, k2=GREEN, k3=ORANGE, unbiased_k3=BLUE + "--",
)  # fmt: skip


def draw(result: dict) -> None:
    """lab_objectives.png and lab_kl.png, one message each."""
    axes = {
        "bias": "bias / length of the true gradient",
        "ess": "effective sample size\n(share of tokens)",
        "spread": "standard deviation of one response\n/ length of the true gradient",
    }
    panels, own = [], result["three tokens"]
    for key, label in axes.items():
        curves = {n: (STYLES[n], STALENESS, [f[key] for f in own[n]]) for n in STYLES if n in own}
        panels.append((curves, dict(xlabel="staleness (optimizer steps)", ylabel=label)))
    title = "Whole-response weights (sequence_is) have no bias; their price is variance"
    draw_panels("lab_objectives", title, panels, (7, 6))
    panels = []
    for spelling in TASKS:
        curves = {}
        for name, facts in result[f"kl, {spelling}"].items():
            errors = [max(f["gradient_error"], 1e-4) for f in facts]
            curves[name] = (STYLES[name], [f["kl"] for f in facts], errors)
        words = dict(xlabel="true KL to the reference (nats)", title=f"responses of {spelling}")
        panels.append((curves, words | dict(xscale="log", yscale="log", ylim=(5e-5, 2))))
    panels[0][1]["ylabel"] = "bias / length of the true gradient\n(0 is drawn at 0.0001)"
    draw_panels("lab_kl", "k1 and k3 have the right value and a wrong gradient", panels)


def main(settings: Settings) -> None:
    """Measure, write results/lab.json and the pictures, print the table of verdicts."""
    torch.set_num_threads(1)
    begin, seed, deep = time.monotonic(), settings.seed, TASKS["three tokens"]
    parts = {name: (objectives_part, task) for name, task in TASKS.items()}
    parts |= {f"kl, {name}": (kl_part, task) for name, task in TASKS.items()}
    parts |= {"advantages": (advantages_part, deep), "lengths": (drop_part,)}
    parts["swap"] = (swap_part, make_task(4, 4))
    result, verdicts = {}, []
    for name, (part, *task) in tqdm(parts.items(), unit="part"):
        result[name], claims = part(*task, seed)
        verdicts += [verdict(claim, settings.samples, seed) for claim in claims]
    rewards = [true_gradient(theta, deep)[0] for theta in policies(deep, seed)]
    result["expected_reward"] = {"by_step": rewards, "optimum": float(deep.rewards.max())}
    draw(result)
    draw_pipeline(result)
    print(" " * 36 + "  estimate     truth        SE predicted  theory says")
    for row in verdicts:
        numbers = "".join(f"{row[k]:10.4f}" for k in ("estimate", "truth", "se", "predicted"))
        mark = "" if row["ok"] else "  NOT AS THEORY SAYS"
        print(f"{row['name']:36}{numbers}  {row['expected']}{mark}")
    print(f"{sum(row['ok'] for row in verdicts)} of {len(verdicts)} as theory says")
    facts = dict(seed=seed, samples=settings.samples, seconds=round(time.monotonic() - begin, 1))
    save_result("lab", facts | dict(verdicts=verdicts, machine=describe_machine()) | result)


if __name__ == "__main__":
    run_main(main, __doc__, Settings)
