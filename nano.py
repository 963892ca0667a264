"""nano.py: asynchronous reinforcement learning of a GPT with sparse attention, in one file.

    python nano.py             # learns to reverse digits, while another process generates
    python nano.py --sync      # the same learner, one thing at a time
    python nano.py --race      # both, and a picture of who worked when: nano.png
    python nano.py --sparse    # with sparse attention

Read it from top to bottom. The title of each part names the files that have the real one: fast,
and hard to break. What this file cannot do stands at its end.

Axes: B answers · T tokens of each · A tokens of an answer alone · G groups, n answers of a group
      H heads · D head width · d model width · K chunks · V vocabulary · P parameters
"""

import argparse
import signal
import time
from collections import deque

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

# ---- 1. A task -------------------------------------------------------------- reward.py, tasks/
# A problem, and a reward for an answer to it. Here "1034>" is to be answered by "4301". Each right
# digit counts: from random weights, an answer that is right as a whole is too rare to learn from.

DIGITS = 4
PROMPT = DIGITS + 1
V = 11  # 0 to 9 and ">"


def problem(number, held_out):
    """The tokens of a prompt; the same for the same number."""
    return [*np.random.default_rng((number, held_out)).integers(10, size=DIGITS), V - 1]


def prompts(numbers, held_out=False):  # [B, PROMPT]
    return torch.tensor(np.array([problem(n, held_out) for n in numbers]))


def rewards(tokens):  # [B, T] -> [B]
    wanted = tokens[:, :DIGITS].flip(1)
    right = tokens[:, PROMPT:] == wanted
    return right.float().mean(1)


# ---- 2. Attention ------------------------------------------------------- dsa.py, dsa_triton.py
# Each token reads what was before it. Sparse attention cuts the past into chunks, scores each by
# its mean key, and reads only the best: however long the text, it reads TOP_K chunks.

CHUNK = 2  # keys in a chunk
TOP_K = 3  # chunks that a query reads, its own included


def attention(
    q,  # [B, H, T, D]
    k,
    v,
    sparse,
):
    T, D = q.shape[2:]
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    if sparse:
        visible = visible & best_chunks(q, k)
    scores = q @ k.mT / D**0.5  # [B, H, T, T]
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


def best_chunks(
    q,  # [B, H, T, D]
    k,
):
    """Which keys lie in the chunks that each query reads: bool [B, H, T, T]."""
    means = [chunk.mean(2) for chunk in k.split(CHUNK, dim=2)]
    scores = q @ torch.stack(means, dim=-1)  # [B, H, T, K]
    K = len(means)
    chunk_of = torch.arange(q.shape[2]) // CHUNK  # [T], of each token
    away = torch.arange(K) - chunk_of[:, None]  # [T, K]
    scores = scores.masked_fill(away == 0, torch.inf)  # its own
    scores = scores.masked_fill(away > 0, -torch.inf)  # the future
    best = scores.topk(min(TOP_K, K)).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen = chosen.scatter(-1, best, True)  # [B, H, T, K]
    return chosen[..., chunk_of]


# ---- 3. A GPT -------------------------------------------------------------------------- model.py
# It says how likely every token is to come next, after the tokens so far. What follows needs to
# know no more of it than that.

LAYERS = 2
WIDTH = 64
HEADS = 4
HIDDEN = 160


def parameter(*shape):
    return nn.Parameter(0.08 * torch.randn(shape))


def norm(x):
    return F.rms_norm(x, (WIDTH,), eps=1e-6)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = parameter(WIDTH, 3 * WIDTH)
        self.attention_out = parameter(WIDTH, WIDTH)
        self.gate_up = parameter(WIDTH, 2 * HIDDEN)
        self.mlp_out = parameter(HIDDEN, WIDTH)

    def forward(self, x, sparse):  # [B, T, d]
        qkv = (norm(x) @ self.qkv).unflatten(-1, (3 * HEADS, -1))  # [B, T, 3 H, D]
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)
        out = attention(q, k, v, sparse).transpose(1, 2)  # [B, T, H, D]
        x = x + out.flatten(2) @ self.attention_out
        gate, up = (norm(x) @ self.gate_up).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ self.mlp_out


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        torch.manual_seed(args.seed)  # the same weights in every process
        self.sparse = args.sparse
        self.embed = parameter(V, WIDTH)
        self.places = parameter(PROMPT + DIGITS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens):  # [B, T] -> log-probs of the next token [B, T, V]
        x = self.embed[tokens] + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, self.sparse)
        return F.log_softmax(norm(x) @ self.embed.T, dim=-1)


# ---- 4. Generation ------------------------------------------------------- rollout.py, cache.py
# One token after the other. Before each, newer weights may arrive: so every token carries the
# version of the policy that said it, and the log-prob that it had there. The learner needs both.


@torch.no_grad()
def generate(
    model,
    tokens,  # of prompts, [B, PROMPT]
    version,  # of the model's weights
    mailbox=None,  # where newer weights may be
):
    """All tokens [B, T]; of the answers, their log-probs as sampled and their versions [B, A]."""
    behaviour, versions = [], []
    for _ in range(DIGITS):
        if mailbox:
            version = mailbox.adopt(model, version)
        log_policy = model(tokens)[:, -1]  # [B, V]
        token = log_policy.exp().multinomial(1)  # [B, 1]
        behaviour.append(log_policy.gather(1, token))
        versions.append(torch.full_like(token, version))
        tokens = torch.cat([tokens, token], dim=1)
    return tokens, torch.cat(behaviour, dim=1), torch.cat(versions, dim=1)


@torch.no_grad()
def solved(model):
    """The share of 256 held-out problems that it answers without a mistake, greedily."""
    tokens = prompts(range(256), held_out=True)
    for _ in range(DIGITS):
        likeliest = model(tokens)[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, likeliest], dim=1)
    return float((rewards(tokens) == 1).float().mean())


# ---- 5. The rollout process ------------------------- runtime/mailbox.py, runtime/pool.py
# It generates while the learner learns. Weights travel through shared memory, and the learner
# writes their version before them and after them. If the two differ, this was read in the middle
# of a write, some weights old and some new (a torn read): it is read again.


class Mailbox:
    def __init__(self, model):
        self.flat = parameters_to_vector(model.parameters()).detach().cpu().share_memory_()  # [P]
        self.begun, self.ended = torch.zeros(2, 1, dtype=torch.long, device="cpu").share_memory_()

    def publish(self, model, version):
        self.begun.fill_(version)
        self.flat.copy_(parameters_to_vector(model.parameters()).detach())
        self.ended.fill_(version)

    def adopt(self, model, version):
        """Take over what is newer than `version`; returns the version that the model has then."""
        while (newest := int(self.ended)) > version:
            flat = self.flat.clone()
            if int(self.begun) == newest:
                vector_to_parameters(flat.to(model.embed.device), model.parameters())
                version = newest
        return version


def rollout_process(args, mailbox, tickets, results):
    """Answer prompts, for ever; a ticket is the number of one. The learner ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner
    torch.set_num_threads(1)
    torch.set_default_device(args.devices[-1])
    model = GPT(args)
    version = -1  # none yet: `adopt` comes before the first token
    while True:
        numbers = [tickets.get()]
        while len(numbers) < GROUPS and not tickets.empty():
            numbers.append(tickets.get())
        begin = time.time()
        tokens = prompts(numbers).repeat_interleave(ANSWERS, dim=0)
        answers = generate(model, tokens, version, mailbox)
        version = int(answers[2].max())
        arrays = [x.cpu().numpy() for x in answers]
        results.put((numbers, arrays, (begin, time.time(), version)))


# ---- 6. The learner --------------------------------------- learner.py, losses.py, methods/
# An answer is good if it is better than the others to the same prompt (GRPO). Its tokens were
# sampled by an older policy mu, and today's is pi: so each has the weight pi / mu, at most
# LARGEST_WEIGHT. If the KL divergence to the reference, averaged over the last 1,000 steps, is
# larger than FAR, the policy learns more slowly and is pulled back more.

ANSWERS = 16  # to each prompt: a group; two or more, or there is nothing to compare
GROUPS = 16  # of a training step
LEARNING_RATE = 2e-3
LARGEST_WEIGHT = 4.0
ENTROPY = 0.02  # its weight in the loss
REFERENCE = 0.001  # and that of the KL divergence to the reference
FAR = 1.0  # that KL on the mean, in nats a token


def group_advantages(reward):  # [G, n]
    better = reward - reward.mean(1, keepdim=True)
    return better / (reward.std(1, keepdim=True) + 1e-6)


def policy_loss(
    logprobs,  # [B, A]
    behaviour,  # log-probs as sampled
    advantages,
):
    # what corrects for who has sampled is a weight, and no way to get better: no gradient
    weight = (logprobs.detach() - behaviour).exp()
    weight = weight.clamp(max=LARGEST_WEIGHT)
    return -(weight * advantages * logprobs).mean()


class Learner:
    def __init__(self, args):
        self.model = GPT(args)
        self.reference = GPT(args)  # where it has begun
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)
        self.window = deque(maxlen=1000)  # of KL values
        self.version = 0  # steps so far

    def step(self, tokens, behaviour):
        """Learn from tokens [B, T] and log-probs as sampled [B, A]; returns the mean reward."""
        reward = rewards(tokens)
        advantages = group_advantages(reward.view(-1, ANSWERS)).view(-1, 1)
        said = tokens[:, PROMPT:, None]
        log_policy = self.model(tokens)[:, PROMPT - 1 : -1]  # [B, A, V]
        logprobs = log_policy.gather(2, said)[..., 0]
        with torch.no_grad():
            reference = self.reference(tokens)[:, PROMPT - 1 : -1].gather(2, said)[..., 0]
        log_ratio = reference - logprobs
        # an estimate that is never negative; of answers of an older policy it is biased (losses.py)
        kl = (log_ratio.exp() - 1 - log_ratio).mean()
        self.window.append(kl.item())
        far = np.mean(self.window) > FAR
        entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
        loss = policy_loss(logprobs, behaviour, advantages.expand_as(logprobs))
        loss = loss - ENTROPY * entropy + (2 if far else 1) * REFERENCE * kl
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (0.6 if far else 1)
        self.optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.version += 1
        return reward.mean().item()


def train(learner, answers, args, log):
    """A step, and now and then a line."""
    tokens, behaviour, versions = answers
    version, begin = learner.version, time.time()
    age = version - versions.float().mean()
    reward = learner.step(tokens, behaviour)
    log.spans.append(("training", begin, time.time(), version))
    if learner.version % 10 == 0:
        seconds = time.time() - log.spans[0][1]
        log.scores.append((seconds, solved(learner.model)))
        line = f"step {learner.version:3}   {seconds:4.1f} s   reward {reward:.2f}   "
        print(line + f"solved {log.scores[-1][1]:4.0%}   staleness {age:.1f}", flush=True)


# ---- 7. The two loops, and staleness ---------------- train_sync.py, train_async.py, buffer.py
# One thing at a time, somebody always waits. Both at once, answers are older than the policy that
# learns from them. How old is decided beforehand: prompt i is trained at version i // GROUPS, and
# admitted at most eta versions earlier, so that at most (eta + 1) * GROUPS are under way. No token
# can be older than that, and no answer is thrown away.


def train_sync(args, log):
    learner = Learner(args)
    while learner.version < args.steps:
        begin, first = time.time(), learner.version * GROUPS
        tokens = prompts(range(first, first + GROUPS)).repeat_interleave(ANSWERS, dim=0)
        answers = generate(learner.model, tokens, learner.version)
        log.spans.append(("generating", begin, time.time(), learner.version))
        train(learner, answers, args, log)


def train_async(args, log):
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # the other one is a process, too
    learner = Learner(args)
    spawn = mp.get_context("spawn")
    mailbox, tickets, results = Mailbox(learner.model), spawn.SimpleQueue(), spawn.Queue()
    arguments = args, mailbox, tickets, results
    worker = spawn.Process(target=rollout_process, args=arguments, daemon=True)
    worker.start()
    admitted, done = 0, {}
    try:
        while learner.version < args.steps:
            last = min(learner.version + args.eta + 1, args.steps)
            while admitted < last * GROUPS:
                tickets.put(admitted)
                admitted += 1
            first = learner.version * GROUPS
            batch = set(range(first, first + GROUPS))
            while not batch <= done.keys():
                numbers, arrays, span = results.get(timeout=60)
                log.spans.append(("generating", *span))
                arrays = [np.split(x, len(numbers)) for x in arrays]
                # number of a prompt -> (tokens, log-probs, versions) of its answers
                done |= zip(numbers, zip(*arrays, strict=True), strict=True)
            groups = [done.pop(number) for number in sorted(batch)]
            answers = map(np.concatenate, zip(*groups, strict=True))
            answers = [torch.tensor(x) for x in answers]
            age = learner.version - int(answers[2].min())
            assert age <= args.eta, f"a token is {age} versions old, at most {args.eta}"
            train(learner, answers, args, log)
            mailbox.publish(learner.model, learner.version)
    finally:
        worker.kill()
        worker.join()


# ---- 8. The race ------------------------------------------------------ bench.py, lab/races.py


def draw(logs, path):
    """Who worked when, for a second in the middle of each run; and the scores against time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="tight")
    axes = figure.subplots(len(logs) + 1)
    for axis, (name, log) in zip(axes, logs.items(), strict=False):
        start = log.spans[len(log.spans) // 2][1]
        for role, begin, end, version in log.spans:
            row = 0.6 if role == "training" else 1.6
            axis.broken_barh([(begin - start, end - begin)], (row, 0.8), color=f"C{version % 6}")
        axis.set(title=name, xlim=(0, 1), yticks=(1, 2), yticklabels=("training", "generating"))
        axes[-1].plot(*zip(*log.scores, strict=True), label=name)
    axes[-2].set_xlabel("seconds; a colour is a version of the policy")
    axes[-1].set(xlabel="seconds", ylabel="held-out problems solved")
    axes[-1].legend()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description="asynchronous RL of a small GPT, in one file")
    parser.add_argument("--sync", action="store_true", help="one thing at a time")
    parser.add_argument(
        "--race",
        action="store_true",
        help="train both ways, and draw them: nano.png",
    )
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="sparse attention",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=150,
        help="training steps",
    )
    parser.add_argument(
        "--eta",
        type=int,
        default=2,
        help="how many versions old a token may be, at most",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    args = parser.parse_args()
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    args.devices = gpus[:2] or ["cpu"]  # of the learner, and of the rollout process
    torch.set_default_device(args.devices[0])
    ways = {"synchronous": train_sync, "asynchronous": train_async}
    if not args.race:
        del ways["asynchronous" if args.sync else "synchronous"]
    logs = {}
    for name, way in ways.items():
        print(name)
        logs[name] = argparse.Namespace(spans=[], scores=[])
        way(args, logs[name])
    if args.race:
        draw(logs, "nano.png")
        print("look at nano.png")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped")

# What this file cannot do, and which files can: survive `kill -9` of a process
# (runtime/pool.py), go on after an interruption (runtime/checkpoint.py), repeat a run bitwise
# (runtime/noise.py, runtime/replay.py), long answers, since it computes all tokens again for each
# (cache.py), answers of many lengths and turns (rollout.py), several learners (runtime/team.py),
# weights of other people (runtime/huggingface.py).
