"""rollout.py: the generator: continuous batching over fixed slots, one token boundary at a time.

`naive_generate` is the idea: one answer, one token at a time. `Generator` does it for many episodes
at once. A slot holds one episode. Every step feeds each slot its next token; where what follows is
not known yet (the policy's turn) one is sampled, where it is (an environment's reply) it is
simply fed. A finished slot is refilled at once. New weights are adopted between two tokens.
Left out: rewards, queues, processes. Token ids in, `Trajectory` out.

Sampling noise is a hash of (run seed, group, sample, position): there is no generator state to
seed, save or share. So an episode depends on its prompt, its noise key and the weight version at
each position, and on nothing that shares the batch: bitwise on CPU (one thread, the same number of
slots), whatever the slot, the neighbours or the order of arrival.

Axes: B slots · T positions of a slot · V tokens of the task's alphabet · d model width
"""

import time
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cache import captured, captures, decode, make_cache, prefill, prefill_groups, reserve
from logprobs import allowed_of
from model import GPT, merged, pack_tokens
from reward import Task, capacity_of
from runtime.config import Config
from runtime.eightbit import Precision, form_of, take
from runtime.messages import Group, Trajectory
from runtime.noise import noise_keys, uniforms
from tasks.environment import Environment, Reply, make_environment

# What the log tells of a span of generation: steps, steps times busy slots, tokens sampled,
# tokens in the longest busy slot summed over the steps, and seconds of the steps alone.
COUNTED = ("steps", "slot_steps", "tokens", "context", "decode")


@torch.no_grad()
def naive_generate(model: GPT, prompt: list, environment, noise_key: int, temperature=1.0):
    """The idea: one turn, one token at a time, everything computed again for each.

    Returns the tokens, prompt included, and the log-probs of those that were sampled.
    """
    alphabet, tokens, logprobs = torch.from_numpy(environment.alphabet), list(prompt), []
    for _ in range(environment.turn_tokens):
        hidden = model(pack_tokens([tokens]))  # [T, d]
        logits = model.logits(hidden[-1:], alphabet)  # [1, V]
        uniform = uniforms(np.array([noise_key]), np.array([len(tokens)]))
        chosen, logprob = sample(logits, torch.from_numpy(uniform), temperature)
        tokens.append(int(alphabet[chosen]))
        logprobs.append(float(logprob))
        if tokens[-1] in environment.stop:
            break
    return tokens, logprobs


@torch.no_grad()
def sample(logits, uniform, temperature: float, top_k=0, top_p=1.0) -> tuple:
    """Sample an index per row of logits [B, V] and its log-prob ([B] int64, [B] float32).

    Inverse transform: the first token whose cumulative probability exceeds the row's number in
    `uniform` [B]. Temperature 0 is greedy. Where sampling is cut, to the `top_k` likeliest (0: all)
    and then to the fewest that have `top_p` of their mass, a third result says what was kept, bool
    [B, V].
    """
    logits, kept = logits / (temperature or 1.0), []
    if top_k or top_p < 1:
        # stable: of two that are equally likely, the one with the lower index comes first
        order = logits.argsort(descending=True, stable=True)[:, : top_k or None]  # [B, K]
        ranked = logits.gather(1, order)
        likelier = F.pad(ranked.softmax(-1).cumsum(-1), (1, -1))  # mass before each: first 0
        if top_p < 1:  # else rounding might leave somebody out
            ranked = ranked.masked_fill(likelier >= top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, ranked)
        kept = [logits > -torch.inf]
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1)
    # the last sum is 1 up to rounding; times it, no number lies beyond the last token
    level = uniform[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, level, right=True)  # [B, 1]
    # a GPU rounds every sum in its own way, so that a token of probability 0 may be hit
    greedy = (logprobs.gather(1, chosen).exp() == 0) | (temperature == 0)
    chosen = torch.where(greedy, logits.argmax(-1, keepdim=True), chosen)
    return chosen[:, 0], logprobs.gather(1, chosen)[:, 0], *kept


# -------------------------------------------------------------------------------- the generator


@dataclass(eq=False)
class Generator:
    """Continuous batching: `submit` groups, call `step` until `busy` is False, collect groups.

    The arrays are the state; row b is slot b. `known[b]` tokens are there, `cached[b]` of them have
    been through the model; a slot samples when all known tokens have been. `versions` tell which
    tokens the policy has said: they are -1 for all others.
    """

    model: GPT
    environment: Environment
    slots: int
    capacity: int
    group_size: int
    seed: int = 0
    temperature: float = 1.0
    cut: tuple = ()  # top-k and top-p, where sampling is cut
    swap: str = "keep"
    worker: int = 0
    precision: Precision = Precision()
    graphs: bool = False

    def __post_init__(self):
        slots, capacity, shape = self.slots, self.capacity, self.model.config
        assert capacity <= shape.context, (capacity, shape.context)
        self.policy = self.model  # with its adapters: merged once a version, not at every token
        if self.policy.flat.dtype == torch.float32:  # bfloat16 rounds most of what they add away
            self.model = merged(self.policy)
        self.alphabet = torch.from_numpy(self.environment.alphabet).to(self.model.flat.device)
        self.parts = self.environment.parts or (self.environment,)  # of each task
        self.stops = np.array([[w in x.stop for w in range(shape.vocab_size)] for x in self.parts])
        self.allowed = allowed_of(self.alphabet, [own.alphabet for own in self.parts])
        self.cache = make_cache(self.model, slots, capacity, self.precision.cache)
        few = 2 * len(self.alphabet) < shape.vocab_size
        self.head = self._output_matrix() if few else None  # a large one would double the matrix
        self.tokens, self.versions = np.zeros((2, slots, capacity), np.int32)
        self.logprobs = np.zeros((slots, capacity), np.float32)
        # idle slots feed position 0
        numbers = np.zeros((5, slots), np.int64)  # the last: which of several tasks
        self.known, self.cached, self.keys, self.turn_end, self.kinds = numbers
        self.running = np.zeros(slots, np.bool_)  # busy, and not waiting for its environment
        self.episodes = [None] * slots  # Trajectory of a busy slot, without arrays until the end
        self.groups = {}  # group id -> Group, those that are not finished
        self.waiting = deque()  # (Group, sample index) of samples that have no slot yet
        self.prompts = {}  # group id -> its prompt's keys and values
        self.kept = [[] for _ in range(slots)]  # token ids that sampling kept, token after token
        self.asked = {}  # (group id, sample index) -> slot: environments outside
        self.calls = []  # to them; whoever owns the generator sends them
        # new_weights: (version, flat) that were offered and not adopted yet
        self.version, self.new_weights = 0, None
        self.finished, self.events = [], []  # events: (time, kind, group or -1, version, details)
        self.counts = Counter(busy=0.0)
        self.captures = []  # the CUDA graph of a step: see `captured`
        # with graphs, prompts up to here are fed token by token, without a prefill
        self.fed_prompts = 64 if self.graphs else 0

    @property
    def busy(self) -> bool:
        return bool(self.groups)

    @property
    def newest(self) -> int:
        """Version of the newest weights that were offered, adopted or not."""
        return self.new_weights[0] if self.new_weights else self.version

    def submit(self, group: Group):
        """Queue every sample of a group; it begins when the weights are as new as its start."""
        self.groups[group.group_id] = group
        self.waiting.extend((group, i) for i in range(self.group_size))

    def set_weights(self, version: int, flat: Tensor):
        """Offer new weights, [P] or packed; they may be the model's own. `step` adopts them; until
        then nobody may write into them."""
        assert version >= self.newest, f"weights of version {version} after {self.newest}"
        self.new_weights = (version, flat)

    def step(self) -> bool:
        """One token boundary: adopt weights, refill slots, decode, sample, ask environments.

        Returns False when there was nothing to decode (no episodes, or all wait for something).
        """
        begin = time.monotonic()
        if self.new_weights:
            self._adopt()
        self._refill()
        if not self.running.any():
            return False
        refilled = time.monotonic()
        self._decode()
        now = time.monotonic()
        self.counts.update(decode=now - refilled, busy=now - begin)
        return True

    def take_finished(self) -> list:
        """Groups that are complete, in order of completion; each is handed out once."""
        finished, self.finished = self.finished, []
        return finished

    def take_calls(self) -> list:
        """What is to be sent to environments outside."""
        calls, self.calls = self.calls, []
        return calls

    def hear(self, key: tuple, answer):
        """The reply of an environment outside: `key` is (group id, sample index)."""
        if (b := self.asked.pop(key, None)) is not None:
            self._go_on(b, self.parts[self.kinds[b]].read(answer))

    def _event(self, kind: str, group_id: int, size: int):
        self.events.append((time.monotonic(), kind, group_id, self.version, {"size": size}))

    # ------------------------------------------------------------------------------- weight swap

    def _adopt(self):
        """Swap weights between two tokens. keep: old keys and values stay, so a new token may read
        keys of older weights (PipelineRL); recompute: they are rebuilt (AReaL); drain: running
        episodes finish first."""
        occupied = [b for b in range(self.slots) if self.episodes[b]]
        if self.swap == "drain" and occupied:
            return  # no new episodes begin meanwhile: see _refill
        version, flat = self.new_weights
        if self.model is not self.policy:  # adapters are merged first, then all is rounded
            self.policy.flat.copy_(flat)
            flat = merged(self.policy, into=self.model).flat
        take(self.model.flat, flat, form_of(self.model, self.precision.weights))
        self.version, self.new_weights = version, None
        self.prompts.clear()  # an episode must not depend on when its siblings began
        if self.head is not None:
            self.head.copy_(self._output_matrix())  # in place: a CUDA graph knows its address
        self._event("swap", -1, len(occupied))
        for b in occupied:
            self.episodes[b].swaps += [int(self.cached[b]), version]
        if self.swap == "recompute":
            filled = [b for b in occupied if self.cached[b]]
            sequences = [self.tokens[b, : self.cached[b]] for b in filled]
            prefill(self.model, self.cache, filled, sequences)

    def _output_matrix(self) -> Tensor:
        """The output matrix for the tokens that this task may emit, and columns of 0: [d, V rounded
        up to 16]. With 11 columns a library sums some rows of a product in another order (MKL on
        AVX2), and an episode would depend on its slot."""
        rows = self.model.output.weight.detach()[self.alphabet]  # [V, d]
        return F.pad(rows, (0, 0, 0, -len(rows) % 16)).t().contiguous()

    # ------------------------------------------------------------------------------------ slots

    def _refill(self):
        """Give free slots to waiting samples, in order; a group never begins under old weights.
        All of a prompt but the last token, which `_decode` feeds, goes into the cache at once."""
        fills = {}  # slot -> its group's id, and these tokens
        draining = self.swap == "drain" and self.new_weights
        for b in range(self.slots):
            if draining or not self.waiting or self.waiting[0][0].start > self.version:
                break
            if self.episodes[b]:
                continue
            group, sample_index = self.waiting.popleft()
            n = len(prompt := self.environment.encode_prompt(group.problem))
            assert 0 < n < self.capacity, f"prompt of {n} tokens: must be 1 to {self.capacity - 1}"
            first = n - 1 if n > self.fed_prompts else 0  # where `_decode` begins
            if first:
                fills[b] = group.group_id, prompt[:first]
            key = noise_keys(self.seed, group.group_id, self.group_size)[sample_index]
            episode = Trajectory(group.group_id, sample_index, key, worker=self.worker)
            episode.started = time.monotonic()
            episode.swaps = [first, self.version]
            self.episodes[b], self.keys[b] = episode, key
            self.kinds[b] = group.group_id % len(self.parts)
            self.known[b], self.cached[b] = 0, first
            self.logprobs[b], self.versions[b] = 0.0, -1
            self._begin_turn(b, prompt)
            if sample_index == 0:
                self._event("start", group.group_id, n)
        if reserve(self.cache, self.cached + 1):
            self.captures.clear()
        prefill_groups(self.model, self.cache, fills, self.prompts)

    def _begin_turn(self, b: int, tokens: list):
        """Append a prompt or an observation; what follows is the policy's turn."""
        episode, start = self.episodes[b], self.known[b]
        stop = start + len(tokens)
        self.tokens[b, start:stop] = tokens
        self.known[b] = stop
        most = self.parts[self.kinds[b]].turn_tokens
        most = self.groups[episode.group_id].problem.get("turn_tokens", most)
        self.turn_end[b] = min(stop + most, self.capacity)
        episode.turns.append((int(stop), -1))  # it ends in `_end_turns`
        self.running[b] = True

    # ----------------------------------------------------------------------------------- decode

    def _next_tokens(self, inputs: tuple) -> tuple:
        """Feed every slot one token and sample what follows: what `sample` returns.

        inputs: tokens, positions, uniform, tasks [B] each.
        """
        tokens, positions, uniform, kinds = inputs
        hidden = decode(self.model, self.cache, tokens, positions)  # [B, d]
        if self.head is None:
            logits = self.model.logits(hidden, self.alphabet)
        else:
            logits = (hidden @ self.head)[:, : len(self.alphabet)].float()
        if self.allowed is not None:
            logits = logits + self.allowed[kinds]
        return sample(logits, uniform, self.temperature, *self.cut)

    def _decode(self):
        """Feed one token to every slot, sample where the next one is not known."""
        longest = int(self.cached[self.running].max())
        tokens = self.tokens[np.arange(self.slots), self.cached].astype(np.int64)
        # noise belongs to the position of the token that is sampled
        arrays = tokens, self.cached, uniforms(self.keys, self.cached + 1), self.kinds
        inputs = [torch.from_numpy(x).to(self.alphabet.device) for x in arrays]
        with torch.inference_mode(not self.graphs):
            step = self._next_tokens
            results = captured(step, inputs, self.captures) if self.graphs else step(inputs)
        chosen, logprobs = (x.cpu().numpy() for x in results[:2])

        self.cached[self.running] += 1
        rows = np.flatnonzero(self.running & (self.cached == self.known))  # the policy's turn
        at = self.known[rows]
        tokens = self.environment.alphabet[chosen[rows]]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs[rows]
        self.versions[rows, at] = self.version
        self.known[rows] += 1
        for kept in results[2:]:  # [B, V]: only what is True in it leaves the device
            ids = self.alphabet.expand_as(kept)[kept].int().cpu().numpy()
            sets = np.split(ids, kept.sum(1).cumsum(0).tolist())
            for b in rows:
                self.kept[b].append(sets[b])
        busy = int(self.running.sum())
        self.counts.update(steps=1, slot_steps=busy, tokens=len(rows), context=longest)
        ended = self.stops[self.kinds[rows], tokens] | (self.known[rows] >= self.turn_end[rows])
        self._end_turns(rows[ended].tolist())

    def _end_turns(self, ended: list):
        """The policy's turn is over in these slots: ask the environment, here or outside."""
        requests = {}  # slot -> what its environment is asked, here
        for b in ended:
            episode, known, own = self.episodes[b], int(self.known[b]), self.parts[self.kinds[b]]
            episode.turns[-1] = (episode.turns[-1][0], known)
            if len(episode.turns) == own.max_turns and not own.judges_all:
                self._go_on(b, Reply([], None))
                continue
            problem, tokens = self.groups[episode.group_id].problem, self.tokens[b, :known].copy()
            request = problem, tokens, list(episode.turns), episode.key
            if own.outside:
                self.running[b], self.asked[episode.key] = False, b
                self.calls.append(own.call(request))
            else:
                requests[b] = request
        for kind, own in enumerate(self.parts):
            mine = [b for b in requests if self.kinds[b] == kind]
            replies = own.respond([requests[b] for b in mine]) if mine else []
            for b, reply in zip(mine, replies, strict=True):
                self._go_on(b, reply)

    def _go_on(self, b: int, reply: Reply):
        """After a turn: begin the next one, or end the episode and free its slot. A group leaves
        when all its samples are in."""
        episode, own, n = self.episodes[b], self.parts[self.kinds[b]], self.known[b]
        if reply.reward is not None and not reply.failure:
            episode.turn_rewards.append(float(reply.reward))
        finish = reply.failure or "stop"
        if reply.observation is not None:
            last = len(episode.turns) == own.max_turns
            if not last and n + len(reply.observation) < self.capacity:
                return self._begin_turn(b, reply.observation)
            if not last or own.stop and not self.stops[self.kinds[b], self.tokens[b, n - 1]]:
                finish = "length"
            self.calls += own.over(episode.key)
        for name in ("tokens", "logprobs", "versions"):
            setattr(episode, name, getattr(self, name)[b, :n].copy())
        episode.loss_mask = episode.versions >= 0
        if self.cut:
            episode.kept_sizes = np.int32([len(kept) for kept in self.kept[b]])
            episode.kept = np.concatenate(self.kept[b])
            self.kept[b].clear()
        episode.finish, _, episode.failure = finish.partition(": ")
        episode.finished = time.monotonic()
        self.episodes[b], self.running[b], self.cached[b] = None, False, 0
        group = self.groups[episode.group_id]
        group.trajectories.append(episode)
        if len(group.trajectories) == self.group_size:
            group.trajectories.sort(key=lambda t: t.sample_index)
            self.finished.append(self.groups.pop(group.group_id))
            self.prompts.pop(group.group_id, None)
            self._event("finish", group.group_id, sum(len(t.tokens) for t in group.trajectories))


def make_generator(config: Config, task: Task, model: GPT, worker: int = 0) -> Generator:
    """The generator that a run uses for training episodes."""
    return Generator(
        model,
        make_environment(config, task),
        slots=config.slots,
        capacity=capacity_of(config, task),
        group_size=config.group_size,
        seed=config.seed,
        temperature=config.temperature,
        cut=config.cut,
        swap=config.swap,
        worker=worker,
        precision=Precision(config.rollout_weights, "auto"),
        graphs=model.flat.is_cuda and captures(model.config),
    )


def generate(generator: Generator, groups: list, host=None) -> list:
    """Run groups to their end and return them sorted by id: the synchronous use. `host` has the
    environments that are outside (tasks/exam.py)."""
    for group in groups:
        assert group.start <= generator.newest, f"group starts at version {group.start}, too late"
        generator.submit(group)
    while generator.busy:
        active = generator.step()
        if host:
            host.send(generator.take_calls())
            for result in host.receive(0.0 if active else 0.5):
                generator.hear(result.key[1:], result)
    return sorted(generator.take_finished(), key=lambda g: g.group_id)
