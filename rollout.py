"""rollout.py: the generator: continuous batching over fixed slots, one token boundary at a time.

`naive_generate` is the idea: one answer, one token at a time. `Generator` does it for many episodes
at once. A slot holds one episode. Every step feeds each slot its next token. On the policy's turn
the one after it is sampled; of an environment's reply it is known, and fed next. A finished slot is
refilled at once. New weights are adopted between two tokens.
Left out: rewards, queues, processes. Token ids in, `Trajectory` out.

Sampling noise is a hash of (run seed, group, sample, position): there is no generator state to
seed, save or share. So an episode depends on its prompt, its noise key and the weight version at
each position, and on nothing that shares the batch: bitwise on CPU (one thread), whatever the slot,
the neighbours, the number of slots or the order of arrival.

Axes: B slots · T positions of a slot · V tokens of the task's alphabet · d model width
"""

import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cache import ROWS, decode, prefill
from fast.eightbit import form_of, take
from fast.graphs import FED_PROMPTS, Captured, captures
from fast.racks import make_racks, prefill_groups
from methods.lora import generating, weights_to_generate
from methods.sampling import KeptTokens, nucleus
from model import GPT, pack_tokens
from reward import Task
from runtime.config import Config
from runtime.messages import Group, Result, Trajectory
from runtime.noise import noise_keys, uniforms
from tasks.environment import Environment, Reply, make_environment

# What the log tells of a span of generation: steps, steps times busy slots, tokens sampled, and
# seconds of the steps alone.
COUNTED = ("steps", "slot_steps", "tokens", "decode")


@torch.no_grad()
def naive_generate(model: GPT, prompt: list, environment, noise_key: int, temperature=1.0):
    """The idea: one turn, one token at a time, everything computed again for each.

    Returns the tokens, prompt included, and the log-probs of those that were sampled.
    """
    alphabet = torch.from_numpy(environment.alphabet)
    tokens = list(prompt)
    logprobs = []
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
def sample(logits, uniform, temperature: float) -> tuple:
    """Sample an index per row of logits [B, V] and its log-prob ([B] int64, [B] float32).

    Inverse transform: the first token whose cumulative probability exceeds the row's number in
    `uniform` [B]. Temperature 0 is greedy.
    """
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    cumulative = logprobs.exp().cumsum(-1)
    # the last sum is 1 up to rounding; times it, no number lies beyond the last token
    level = uniform[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, level, right=True)  # [B, 1]
    # a GPU rounds every sum in its own way, so that a token of probability 0 may be hit
    greedy = (logprobs.gather(1, chosen).exp() == 0) | (temperature == 0)
    chosen = torch.where(greedy, logits.max(-1, keepdim=True).indices, chosen)
    return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]


# -------------------------------------------------------------------------------- the generator


@dataclass(eq=False)
class Slot:
    """An episode while it is generated. The first `cached` tokens have been through the model;
    when all of them have been, the next one is sampled."""

    number: int  # row of the batch
    episode: Trajectory  # its arrays come at the end
    group: Group | None = None
    cached: int = 0
    turn_end: int = 0  # tokens that there may be when the policy's turn ends
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    versions: list = field(default_factory=list)  # -1 where the policy did not generate


IDLE = Slot(-1, Trajectory(-1, 0, noise_key=0), tokens=[0])  # what an empty slot feeds


@dataclass(eq=False)
class Generator:
    """Continuous batching: `submit` groups, call `step` until `busy` is False, collect groups."""

    model: GPT
    environment: Environment
    config: Config
    capacity: int  # positions of a slot
    graphs: bool = False

    def __post_init__(self):
        assert self.capacity <= self.model.config.context, (self.capacity, self.model.config)
        self.policy = self.model  # with its adapters, if it has any
        self.model = generating(self.policy)
        self.alphabet = torch.from_numpy(self.environment.alphabet).to(self.model.flat.device)
        # a library sums some rows of a product with 11 columns in another order (MKL on AVX2), and
        # an episode would depend on its slot: so with token 0, logits have a multiple of 16 columns
        self.padded = F.pad(self.alphabet, (0, -len(self.alphabet) % 16))
        rows = self.config.slots + -self.config.slots % ROWS  # the last ones stay empty
        self.cache = make_racks(self.model, rows, self.capacity)
        self.batch = [None] * rows  # a Slot each, where there is an episode
        self.groups = {}  # group id -> Group, those that are not finished
        self.waiting = deque()  # (Group, sample index) of samples that have no slot yet
        self.prompts = {}  # group id -> its prompt's keys and values
        self.kept = KeptTokens(self.alphabet) if self.config.top_p < 1 else None
        self.asked = {}  # (group id, sample index) -> Slot: environments outside
        self.calls = []  # to them; whoever owns the generator sends them
        self.version = 0
        self.new_weights = None  # (version, flat) that were offered and not adopted yet
        self.finished = []
        self.events = []  # (time, kind, group or -1, version, details)
        self.counts = Counter()
        # it refers to no generator: in a cycle, a generator would outlive its evaluation
        self.captured = Captured() if self.graphs else None
        self.longest_fed = FED_PROMPTS if self.graphs else 0  # longer ones are prefilled

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
        self.waiting.extend((group, i) for i in range(self.config.group_size))

    def set_weights(self, version: int, flat: Tensor):
        """Offer new weights, [P] or packed; they may be the model's own. `step` adopts them; until
        then nobody may write into them."""
        assert version >= self.newest, f"weights of version {version} after {self.newest}"
        self.new_weights = (version, flat)

    def step(self, until: dict | None = None) -> bool:
        """One token boundary: adopt weights, refill slots, decode, sample, ask environments.

        until: (group id, sample index) -> how many tokens may be fed, for a replay. Returns False
        when there was nothing to decode (no episodes, or all wait for something).
        """
        self._adopt()
        self._refill()
        running = [slot for slot in self.batch if slot and slot.episode.key not in self.asked]
        if until is not None:
            running = [slot for slot in running if slot.cached < until[slot.episode.key]]
        if not running:
            return False
        decoding = time.monotonic()
        sampled = self._decode()
        ended = self._append(running, *sampled)
        self._end_turns(ended)
        self.counts.update(decode=time.monotonic() - decoding)
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
        if slot := self.asked.pop(key, None):
            self._go_on(slot, self.environment.read(answer))

    def _event(self, kind: str, group_id: int, size: int):
        self.events.append((time.time(), kind, group_id, self.version, {"size": size}))

    # ------------------------------------------------------------------- schedule: who has a slot

    def _adopt(self):
        """Swap weights between two tokens; what was sampled before keeps its log-probs and version.

        keep        old keys and values stay: new tokens read keys of older weights (PipelineRL)
        recompute   they are computed again (AReaL)
        drain       running episodes finish first, and no new ones begin meanwhile
        """
        occupied = [slot for slot in self.batch if slot]
        if not self.new_weights or self.config.swap == "drain" and occupied:
            return
        self.version, flat = self.new_weights
        self.new_weights = None
        flat = weights_to_generate(self.policy, self.model, flat)
        take(self.model.flat, flat, form_of(self.model, self.config.rollout_weights))
        self.prompts.clear()  # they are of the old weights
        self._event("swap", -1, len(occupied))
        for slot in occupied:
            slot.episode.swaps += [slot.cached, self.version]
        if self.config.swap == "recompute":
            filled = {slot.number: slot.tokens[: slot.cached] for slot in occupied if slot.cached}
            prefill(self.model, self.cache, [*filled], [*filled.values()])

    def _refill(self):
        """Give free slots to waiting samples, in order; a group never begins under old weights, nor
        while newer ones wait for a drain."""
        prompts = {}  # slot -> its group's id, and the tokens that go into the cache at once
        for b in range(self.config.slots):
            if self.new_weights or not self.waiting or self.waiting[0][0].start > self.version:
                break
            if not self.batch[b]:
                slot = self.batch[b] = self._begin(b, *self.waiting.popleft())
                if slot.cached:
                    prompts[b] = slot.group.group_id, slot.tokens[: slot.cached]
        lengths = [slot.cached + 1 if slot else 1 for slot in self.batch]
        self.cache.reserve(lengths)
        prefill_groups(self.model, self.cache, prompts, self.prompts, self.config)

    def _begin(self, b: int, group: Group, sample_index: int) -> Slot:
        """Begin an episode: all of its prompt but the last token, which `_decode` feeds, counts as
        cached."""
        n = len(prompt := self.environment.encode_prompt(group.problem))
        assert 0 < n < self.capacity, f"prompt of {n} tokens: must be 1 to {self.capacity - 1}"
        keys = noise_keys(self.config.seed, group.group_id, self.config.group_size)
        episode = Trajectory(group.group_id, sample_index, keys[sample_index])
        slot = Slot(b, episode, group, cached=n - 1 if n > self.longest_fed else 0)
        episode.swaps = [slot.cached, self.version]
        self._begin_turn(slot, prompt)
        if sample_index == 0:
            self._event("start", group.group_id, n)
        return slot

    # ---------------------------------------------------------------------- run: one token a slot

    def _decode(self) -> tuple:
        """Feed one token to every slot and sample what may follow: ids and log-probs [B]; and which
        tokens sampling kept, bool [B, V], or None."""
        slots = [slot or IDLE for slot in self.batch]
        positions = np.array([slot.cached for slot in slots])
        keys = np.array([slot.episode.noise_key for slot in slots])
        tokens = np.array([slot.tokens[slot.cached] for slot in slots])
        arrays = tokens, positions, uniforms(keys, positions + 1)
        inputs = [torch.from_numpy(x).to(self.alphabet.device) for x in arrays]
        step = self._next_tokens
        with torch.inference_mode():
            sampled = self.captured(step, *inputs) if self.captured else step(*inputs)
        chosen, logprobs, kept = sampled
        ids = self.environment.alphabet[chosen.cpu().numpy()]
        return ids.tolist(), logprobs.cpu().tolist(), kept

    def _next_tokens(self, tokens, positions, uniform) -> tuple:
        """The work of a device in `_decode`, [B] each: chosen, of the alphabet; log-probs; kept."""
        hidden = decode(self.model, self.cache, tokens, positions)  # [B, d]
        logits = self.model.logits(hidden, self.padded)[:, : len(self.alphabet)]  # [B, V]
        temperature = self.config.temperature
        kept = None
        if self.kept:
            kept = nucleus(logits / (temperature or 1.0), self.config.top_p)
            logits = logits.masked_fill(~kept, -torch.inf)
        return *sample(logits, uniform, temperature), kept

    # ------------------------------------------------------------- bookkeeping: what comes of it

    def _append(self, running: list, ids: list, logprobs: list, kept) -> list:
        """Every slot that runs has fed a token; where no other is known, the policy has generated
        one. Returns the slots whose turn that has ended."""
        ended = []
        generated = []
        for slot in running:
            slot.cached += 1
            if slot.cached == len(slot.tokens):  # the policy's turn
                b = slot.number
                slot.tokens.append(ids[b])
                slot.logprobs.append(logprobs[b])
                slot.versions.append(self.version)
                generated.append(b)
                if ids[b] in self.environment.stop or len(slot.tokens) >= slot.turn_end:
                    ended.append(slot)
        if self.kept:
            self.kept.add(generated, kept)
        self.counts.update(steps=1, slot_steps=len(running), tokens=len(generated))
        return ended

    def _begin_turn(self, slot: Slot, tokens: list):
        """Append a prompt or an observation; what follows is the policy's turn."""
        slot.tokens += tokens
        slot.logprobs += [0.0] * len(tokens)
        slot.versions += [-1] * len(tokens)
        start = len(slot.tokens)
        most = slot.group.problem.get("turn_tokens", self.environment.turn_tokens)
        slot.turn_end = min(start + most, self.capacity)
        slot.episode.turns.append((start, -1))  # it ends in `_end_turns`

    def _last_turn(self, slot: Slot) -> bool:
        most = slot.group.problem.get("max_turns", self.environment.max_turns)
        return len(slot.episode.turns) == most

    def _end_turns(self, ended: list):
        """The policy's turn is over in these slots: ask the environment, here or outside."""
        environment = self.environment
        requests = {}  # of those in this process, by slot
        for slot in ended:
            episode = slot.episode
            episode.turns[-1] = (episode.turns[-1][0], len(slot.tokens))
            request = slot.group.problem, np.int32(slot.tokens), [*episode.turns], episode.key
            if self._last_turn(slot) and not environment.judges_all:
                self._go_on(slot, Reply([], None))  # nobody is asked; its state is given up
            elif environment.outside:
                self.asked[episode.key] = slot
                self.calls.append(environment.call(request))
            else:
                requests[slot] = request
        for slot, reply in zip(requests, environment.respond([*requests.values()]), strict=True):
            self._go_on(slot, reply)

    def _go_on(self, slot: Slot, reply: Reply):
        """After a turn: begin the next one, or end the episode."""
        if reply.reward is not None and not reply.failure:
            slot.episode.turn_rewards.append(float(reply.reward))
        stop = self.environment.stop
        can_stop = slot.group.problem.get("_ends", bool(stop))  # else no turn is shorter, or cut
        cut_off = can_stop and slot.tokens[-1] not in stop
        finish = reply.failure or ("length" if cut_off else "stop")
        if reply.observation is not None:  # the environment would go on; is there room to?
            last = self._last_turn(slot)
            if not last and len(slot.tokens) + len(reply.observation) < self.capacity:
                self._begin_turn(slot, reply.observation)
                return
            if not last:
                finish = "length"
            self.calls += self.environment.over(slot.episode.key)
        self._finish(slot, finish)

    def _finish(self, slot: Slot, finish: str):
        """The episode is over, its slot free. A group leaves when all its samples are in."""
        episode = slot.episode
        group = slot.group
        episode.tokens = np.int32(slot.tokens)
        episode.versions = np.int32(slot.versions)
        episode.logprobs = np.float32(slot.logprobs)
        episode.loss_mask = episode.versions >= 0
        if self.kept:
            vars(episode).update(self.kept.take(slot.number))
        episode.finish, _, episode.failure = finish.partition(": ")
        self.batch[slot.number] = None
        group.trajectories.append(episode)
        if len(group.trajectories) == self.config.group_size:
            group.trajectories.sort(key=lambda t: t.sample_index)
            self.finished.append(self.groups.pop(group.group_id))
            self.prompts.pop(group.group_id, None)
            self._event("finish", group.group_id, sum(len(t.tokens) for t in group.trajectories))


def make_generator(config: Config, task: Task, model: GPT, outside=False) -> Generator:
    """The generator that a run uses; outside: no code of the task runs in this process."""
    environment = make_environment(config, task, outside)
    return Generator(model, environment, config, task.context, captures(model))


def generate(generator: Generator, groups: list, pool=None) -> list:
    """Run groups to their end and return them sorted by id: the synchronous use. `pool` has the
    environments that are outside (runtime/pool.py); None where there are none."""
    for group in groups:
        assert group.start <= generator.newest, f"group starts at version {group.start}, too late"
        generator.submit(group)
    while generator.busy:
        active = generator.step()
        if pool and (generator.asked or generator.calls):
            pool.ask(generator.take_calls())
            for _, message in pool.receive(0.0 if active else 0.5):
                if isinstance(message, Result):
                    generator.hear(message.key, message)
    return sorted(generator.take_finished(), key=lambda g: g.group_id)
