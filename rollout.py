"""rollout.py: the generator: continuous batching over fixed slots, one token boundary at a time.

A slot holds one episode. Every step feeds each slot its next token; where that token is not known
yet (the policy's turn) one is sampled, where it is (prompt, environment reply) it is simply fed.
A finished slot is refilled at once. New weights are adopted between two tokens (`swap`).
Left out: rewards, queues, processes. Token ids in, `Trajectory` out.

Sampling noise is a pure function of (run seed, group, sample, position), so an episode
depends on its prompt, its seed and the weight versions at each position, and on nothing that
shares the batch: bitwise on CPU (one thread, the same number of slots), whatever the slot, the
neighbours or the order of arrival.

Axes: B slots · T capacity · V tokens of the task's alphabet
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cache import Cache, captured, decode, make_cache, prefill, read_prefix, write_prefix
from model import GPT
from reward import Task, split_answers
from runtime import limits
from runtime.config import Config, UserError
from runtime.messages import Group, Trajectory
from runtime.tokenizer import PAD, VOCAB_SIZE, encode

MASK32 = 0xFFFFFFFF


# What an event log tells of a span of generation: steps, steps times busy slots, tokens sampled,
# tokens in the longest busy slot summed over the steps, and seconds of the steps alone.
COUNTED = ("steps", "slot_steps", "tokens", "context", "decode")


def mix(x):
    """A 32-bit integer hash of values in [0, 2^32), ints or int64 arrays ("lowbias32", found by
    C. Wellons' hash search). int64 products wrap around, which leaves their low 32 bits right.
    """
    x = x ^ (x >> 16)  # a new array; what follows works in place
    x *= 0x7FEB352D
    x &= MASK32
    x ^= x >> 15
    x *= 0x846CA68B
    x &= MASK32
    x ^= x >> 16
    return x


@lru_cache(1024)
def noise_keys(seed: int, group_id: int, group_size: int) -> list[int]:
    """The 62-bit keys of the sampling noise of a group's trajectories, one for each sample."""
    low, high = 0x9E3779B9, 0x85EBCA6B
    for part in (seed, group_id, group_id >> 32, np.arange(group_size)):
        low = mix((low ^ part) & MASK32)
        high = mix((high + part * 0xC2B2AE35 + low) & MASK32)
    return ((high & 0x3FFFFFFF) << 32 | low).tolist()


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in (0, 1), float32 [B], for each key and position, int64 [B] each. It has 23 bits
    and a half: neither 0 nor 1 can come out."""
    bits = mix((keys & MASK32) ^ mix((keys >> 32) ^ (positions * 0x9E3779B9 & MASK32)))
    return ((bits >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


@torch.no_grad()
def sample(logits: Tensor, uniform: Tensor, temperature: float):
    """Sample an index per row of logits [B, V] and its log-prob ([B] int64, [B] float32).

    Inverse transform: the first token whose cumulative probability exceeds the row's number in
    `uniform` [B]. One number a row is enough, where Gumbel noise needs one for every token.
    Temperature 0 is greedy.
    """
    if temperature == 0:
        chosen, logprobs = logits.argmax(-1), torch.log_softmax(logits, -1)
    else:
        scaled = logits if temperature == 1 else logits / temperature
        logprobs = torch.log_softmax(scaled, -1)
        cumulative = logprobs.exp().cumsum(-1)
        # the last sum is 1 up to rounding; times it, no number lies beyond the last token
        level = uniform[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, level, right=True)[:, 0]
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def next_tokens(model: GPT, cache: Cache, head: Tensor, fed: tuple, letters: int, temperature):
    """Feed every slot and sample what follows: what `compiled` makes one function of.

    fed: tokens, positions, uniform [B] each, and the longest position; head [d, V and padding].
    Returns what `sample` does. The compiled form ignores `longest`, a new number at each step.
    """
    tokens, positions, uniform, longest = fed
    hidden = decode(model, cache, tokens, positions, longest)
    return sample((hidden @ head)[:, :letters], uniform, temperature)


@dataclass
class Episode:
    """What a busy slot knows besides its token arrays."""

    group: Group
    sample_index: int
    seed: int
    started: float
    turns: list[tuple[int, int]] = field(default_factory=list)
    reply: Future | None = None  # an environment turn that runs beside generation
    deadline: float = 0.0  # when to give up on it
    swaps: list[int] = field(default_factory=list)  # see Trajectory


@dataclass
class Environment:
    """How the generator talks to a task.

    respond([(problem, tokens, turns), ...]) -> for each request the observation's token ids, None
    when the episode is over, or the reason (str) why the environment failed: that episode is
    marked with it (`env_error`, `env_timeout`), counted, and generation goes on.
    """

    encode_prompt: Callable[[dict], list[int]]
    respond: Callable[[list[tuple]], list[list[int] | None | str]]
    alphabet: np.ndarray  # int64 [V], the token ids that the policy may emit
    stop: frozenset[int]  # token ids that end a turn
    turn_tokens: int  # most tokens in a turn; a problem may carry its own "turn_tokens"
    max_turns: int = 2**30  # after so many the episode is over, and nobody is asked
    beside: bool = False  # run `respond` in a thread, beside generation
    seconds: float = 2.0  # limit of an environment turn that runs beside


def in_thread(function: Callable, *args) -> Future:
    """Call a function in a thread of its own. Not in a pool: calls that never return would fill
    it up, and Python waits for a pool's threads before it exits."""
    future: Future = Future()

    def call():
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


class Generator:
    """Continuous batching: `submit` groups, call `step` until `busy` is False, collect groups.

    The arrays are the state; row b is slot b. `known[b]` tokens are there, `fed[b]` of them have
    been through the model; a slot samples when they are equal (all known tokens were fed).
    """

    def __init__(
        self,
        model: GPT,
        environment: Environment,
        slots: int,
        capacity: int,
        group_size: int,
        seed: int = 0,
        temperature: float = 1.0,
        swap: str = "keep",
        worker: int = 0,
        weights: torch.dtype = torch.float32,
        compiled: bool = False,
    ):
        assert capacity <= model.config.context, (capacity, model.config.context)
        self.model, self.environment, self.capacity = model, environment, capacity
        self.group_size, self.seed, self.temperature = group_size, seed, temperature
        self.swap, self.worker, self.weights, self.version = swap, worker, weights, 0
        device = model.flat.device
        self.cache = make_cache(model, slots, capacity)
        # The same memory, each layer apart: a compiled step would copy what is part of a whole.
        self.layers = self.cache._replace(k=self.cache.k.unbind(), v=self.cache.v.unbind())
        self.letters = environment.alphabet.astype(np.int32)
        self.alphabet = torch.from_numpy(environment.alphabet).to(device)
        self.head = self._output_matrix()
        self.stop = np.isin(np.arange(model.config.vocab_size), list(environment.stop))
        self.tokens = np.zeros((slots, capacity), np.int32)
        self.loss_mask = np.zeros((slots, capacity), np.bool_)
        self.logprobs = np.zeros((slots, capacity), np.float32)
        self.versions = np.zeros((slots, capacity), np.int32)
        self.known = np.ones(slots, np.int64)  # idle slots feed token 0 at position 0
        self.fed = np.zeros(slots, np.int64)
        self.turn_start = np.zeros(slots, np.int64)
        self.turn_limit = np.zeros(slots, np.int64)
        self.keys = np.zeros(slots, np.int64)
        self.running = np.zeros(slots, np.bool_)  # busy, and not waiting for its environment
        self.episodes: list[Episode | None] = [None] * slots
        self.waiting: deque[tuple[Group, int]] = deque()  # samples that have no slot yet
        self.prompts: dict[int, tuple[int, list[Tensor]]] = {}  # version, prefix of the cache
        self.new_weights: tuple[int, Tensor | None] | None = None
        self.finished: list[Group] = []
        self.events: list[tuple] = []  # (time, kind, group or -1, version, tokens or episodes)
        self.counts = dict.fromkeys((*COUNTED, "swaps"), 0) | {"busy": 0.0}
        self.next_tokens = torch.inference_mode()(next_tokens)
        # It takes seconds, so it is done before the first episode; on one thread and without helper
        # processes, because this may be a worker.
        self.fed_prompts = 0  # longest prompt that is fed token by token, without a prefill
        if compiled:
            assert model.config.attention == "dense", "sparse attention cannot be compiled"
            how = {"dynamic": False, "options": {"compile_threads": 1, "cpp.threads": 1}}
            compiler = partial(torch.compile, **how)
            if device.type == "cuda":  # where a step is quicker than launching a prefill
                compiler, self.fed_prompts = partial(captured, slots=slots), 64
            self.next_tokens = torch.no_grad()(compiler(next_tokens))
            self._feed(longest=0)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(e is not None for e in self.episodes)

    @property
    def newest(self) -> int:
        """Version of the newest weights that were offered, adopted or not."""
        return self.new_weights[0] if self.new_weights else self.version

    def submit(self, group: Group) -> None:
        """Queue every sample of a group; it begins when the weights are as new as its start."""
        self.waiting.extend((group, i) for i in range(self.group_size))

    def set_weights(self, version: int, flat: Tensor | None) -> None:
        """Offer new weights [P] (None: the model shares the learner's); adopted by `step`, until
        when nobody may write into them."""
        assert version >= self.newest, f"weights of version {version} after {self.newest}"
        self.new_weights = (version, flat)

    def step(self) -> bool:
        """One token boundary: adopt weights, collect replies, refill slots, decode, sample.

        Returns False when there was nothing to decode (no episodes, or all wait for something).
        """
        begin = time.monotonic()
        if self.new_weights is not None:
            self._adopt()
        self._collect_replies()
        self._refill()
        if not self.running.any():
            return False
        refilled = time.monotonic()
        self._decode()
        now = time.monotonic()
        self.counts["decode"] += now - refilled
        self.counts["busy"] += now - begin
        return True

    # ------------------------------------------------------------------------------- weight swap

    def _adopt(self) -> None:
        """Swap weights between two tokens. keep: old keys and values stay (PipelineRL);
        recompute: they are rebuilt (AReaL); drain: running episodes finish first."""
        occupied = [b for b, e in enumerate(self.episodes) if e is not None]
        if self.swap == "drain" and occupied:
            return  # no new episodes begin meanwhile: see _refill
        version, flat = self.new_weights
        if flat is not None:
            self.model.flat.copy_(flat.to(self.weights))  # rounded, then float32 again
        self.version, self.new_weights = version, None
        self.head.copy_(self._output_matrix())  # in place: a CUDA graph knows its address
        self.counts["swaps"] += 1
        for b in occupied:
            self.episodes[b].swaps += [int(self.fed[b]), version]
        self.events.append((time.monotonic(), "swap", -1, version, len(occupied)))
        if self.swap == "recompute":
            stale = [b for b in occupied if self.fed[b] > 0]
            if stale:
                slots = torch.tensor(stale, device=self.alphabet.device)
                fed = [self.tokens[b, : self.fed[b]] for b in stale]
                prefill(self.model, self.cache, slots, fed)

    def _output_matrix(self) -> Tensor:
        """The tied output matrix, as far as this task can emit it, and columns of 0: [d, V, rounded
        up to 16]. With 11 columns a library sums some rows of a product in another order (MKL on
        AVX2), and an episode would depend on its slot."""
        rows = self.model.embed_tokens.weight.detach()[self.alphabet]
        return F.pad(rows, (0, 0, 0, -len(rows) % 16)).t().contiguous()

    # ------------------------------------------------------------------------------------ slots

    def _refill(self) -> None:
        """Give free slots to waiting samples, in order; a group never begins under old weights."""
        if not self.waiting or (self.swap == "drain" and self.new_weights is not None):
            return
        begun = []
        for b, episode in enumerate(self.episodes):
            if episode is not None:
                continue
            if not self.waiting or self.waiting[0][0].start > self.version:
                break
            group, sample_index = self.waiting.popleft()
            begun.append((b, group, self._begin(b, group, sample_index)))
        self._share_prompts([entry for entry in begun if len(entry[2])])

    def _begin(self, b: int, group: Group, sample_index: int) -> list[int]:
        """Put one sample into slot b; returns the prompt tokens that must be in the cache: all but
        the last one, which `_decode` feeds, or none."""
        prompt = self.environment.encode_prompt(group.problem)
        limit = self.capacity - 1
        assert 0 < len(prompt) <= limit, f"prompt of {len(prompt)} tokens: must be 1 to {limit}"
        n = len(prompt)
        self.tokens[b, :n], self.loss_mask[b], self.logprobs[b] = prompt, False, 0.0
        self.versions[b] = -1
        at = n - 1 if n > self.fed_prompts else 0  # where `_decode` begins
        self.known[b], self.fed[b], self.turn_start[b] = n, at, n
        self.turn_limit[b] = group.problem.get("turn_tokens", self.environment.turn_tokens)
        seed = noise_keys(self.seed, group.group_id, self.group_size)[sample_index]
        self.keys[b], self.running[b] = seed, True
        now = time.monotonic()
        self.episodes[b] = Episode(group, sample_index, seed, now, swaps=[at, self.version])
        if sample_index == 0:
            self.events.append((now, "start", group.group_id, self.version, n))
        return prompt[:at]

    def _share_prompts(self, begun: list[tuple[int, Group, list[int]]]) -> None:
        """Fill the cache of slots that begin: prompts are computed once a group, then copied.

        They are computed again after a swap: an episode must not depend on when its siblings began.
        """
        cache, first = self.cache, {}  # group id -> the slot that computes its prompt
        for b, group, prompt in begun:
            if self.prompts.get(group.group_id, (-1,))[0] != self.version:
                first.setdefault(group.group_id, (b, prompt))
        if first:
            slots, prompts = zip(*first.values(), strict=True)
            prefill(self.model, cache, torch.tensor(slots, device=self.alphabet.device), prompts)
            for group_id, (b, prompt) in first.items() if self.group_size > 1 else ():
                self.prompts[group_id] = (self.version, read_prefix(cache, b, len(prompt)))
        for b, group, _ in begun:
            if first.get(group.group_id, (-1,))[0] != b:
                write_prefix(cache, b, self.prompts[group.group_id][1])
            if self.episodes[b].sample_index == self.group_size - 1:
                self.prompts.pop(group.group_id, None)

    # ----------------------------------------------------------------------------------- decode

    def _decode(self) -> None:
        """Feed one token to every slot, sample where the next one is not known."""
        chosen, logprobs = self._feed(longest := int(self.fed[self.running].max()))

        self.fed[self.running] += 1
        rows = np.flatnonzero(self.running & (self.fed == self.known))  # the policy's turn
        at, drawn = self.known[rows], chosen[rows]
        self.tokens[rows, at] = drawn
        self.logprobs[rows, at] = logprobs[rows]
        self.loss_mask[rows, at] = True
        self.versions[rows, at] = self.version
        self.known[rows] += 1
        self.counts["tokens"] += len(rows)
        self.counts["steps"] += 1
        self.counts["slot_steps"] += int(self.running.sum())
        self.counts["context"] += longest

        known = self.known[rows]
        in_turn = known - self.turn_start[rows] >= self.turn_limit[rows]
        ended = rows[self.stop[drawn] | in_turn | (known >= self.capacity)]
        if len(ended):
            self._end_turns(ended.tolist())

    def _feed(self, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """Feed all slots; tokens that are sampled behind, and their log-probs, [B] each."""
        rows, fed, device = np.arange(len(self.fed)), self.fed, self.alphabet.device
        # noise belongs to the position of the token that is sampled
        arrays = self.tokens[rows, fed].astype(np.int64), fed, uniforms(self.keys, fed + 1)
        inputs = *(torch.from_numpy(x).to(device) for x in arrays), longest
        how = self.head, inputs, len(self.letters), self.temperature
        chosen, logprobs = self.next_tokens(self.model, self.layers, *how)
        return self.letters[chosen.cpu().numpy()], logprobs.cpu().numpy()

    def _end_turns(self, ended: list[int]) -> None:
        """The policy's turn is over in these slots: ask the environment, here or beside."""
        requests, starts, ends = {}, self.turn_start[ended].tolist(), self.known[ended].tolist()
        for b, start, known in zip(ended, starts, ends, strict=True):
            episode = self.episodes[b]
            episode.turns.append((start, known))
            if len(episode.turns) >= self.environment.max_turns:
                cut = self.environment.stop and not self.stop[self.tokens[b, known - 1]]
                self._finish(b, "length" if cut else "stop")
                continue
            tokens, turns = self.tokens[b, :known].copy(), list(episode.turns)
            requests[b] = (episode.group.problem, tokens, turns)
        if requests and not self.environment.beside:
            replies = self.environment.respond(list(requests.values()))
            for b, reply in zip(requests, replies, strict=True):
                self._observe(b, reply)
            return
        for b, request in requests.items():
            self.running[b], episode = False, self.episodes[b]
            episode.reply = in_thread(self.environment.respond, [request])
            episode.deadline = time.monotonic() + self.environment.seconds

    def _collect_replies(self) -> None:
        """Take the replies of environments that ran beside generation; give up on late ones."""
        if not self.environment.beside:
            return
        for b, episode in enumerate(self.episodes):
            if episode is None or episode.reply is None:
                continue
            if episode.reply.done():
                (reply,) = episode.reply.result()
                episode.reply, self.running[b] = None, True
                self._observe(b, reply)
            elif time.monotonic() > episode.deadline:
                self._finish(b, "env_timeout")

    def _observe(self, b: int, reply: list[int] | None | str) -> None:
        """Append the environment's tokens, or finish the episode."""
        start = int(self.known[b])
        if reply is None or isinstance(reply, str):
            return self._finish(b, reply or "stop")
        stop = start + len(reply)
        if stop >= self.capacity:
            return self._finish(b, "length")
        self.tokens[b, start:stop] = reply
        self.known[b], self.turn_start[b] = stop, stop

    def _finish(self, b: int, reason: str) -> None:
        """Turn slot b into a Trajectory and free it; a group leaves when all its samples are in."""
        episode, n = self.episodes[b], int(self.known[b])
        group = episode.group
        arrays = (self.tokens, self.loss_mask, self.logprobs, self.versions)
        now = time.monotonic()
        group.trajectories.append(
            Trajectory(
                group.group_id,
                episode.sample_index,
                episode.seed,
                *(a[b, :n].copy() for a in arrays),
                turns=episode.turns,
                finish=reason,
                worker=self.worker,
                started=episode.started,
                finished=now,
                swaps=episode.swaps,
            )
        )
        self.episodes[b], self.running[b] = None, False
        self.known[b], self.fed[b], self.tokens[b, 0] = 1, 0, 0
        if len(group.trajectories) == self.group_size:
            group.trajectories.sort(key=lambda t: t.sample_index)
            self.finished.append(group)
            tokens = sum(len(t.tokens) for t in group.trajectories)
            self.events.append((now, "finish", group.group_id, self.version, tokens))

    def take_finished(self) -> list[Group]:
        """Groups that are complete, in order of completion; each is handed out once."""
        finished, self.finished = self.finished, []
        return finished


def generate(generator: Generator, groups: list[Group]) -> list[Group]:
    """Run groups to their end and return them sorted by id: the synchronous use."""
    newest = generator.newest
    for group in groups:
        assert group.start <= newest, f"group starts at version {group.start}, weights are {newest}"
        generator.submit(group)
    while generator.busy:
        if not generator.step():
            time.sleep(0.0005)  # every episode waits for its environment
    return sorted(generator.take_finished(), key=lambda g: g.group_id)


def alphabet_of(task: Task) -> np.ndarray:
    """Token ids the policy may emit [V]: the task's own, or all but padding."""
    everything = (i for i in range(VOCAB_SIZE) if i != PAD)
    return np.array(task.alphabet or list(everything), np.int64)


def capacity_of(config: Config, task: Task) -> int:
    """Positions that an episode may fill; raises UserError when the task needs more."""
    if config.context and config.context < task.context:
        raise UserError(
            f"--context {config.context}: must be at least {task.context} for the longest prompt "
            f"({task.max_prompt_tokens} tokens) and its answer in task {config.task} (0: automatic)"
        )
    if task.context > 131072:
        raise UserError(f"--task {config.task}: must fit into 131072 tokens, needs {task.context}")
    return config.context or task.context


def make_environment(config: Config, task: Task) -> Environment:
    """Join the task (text) to the generator (token ids)."""

    limit, memory = config.reward_seconds, config.reward_memory

    def respond(requests: list[tuple]) -> list[list[int] | None | str]:
        replies: list = []
        while len(replies) < len(requests):
            begin = time.monotonic()
            if replies.count("env_timeout") == 3:  # no more patience at this token boundary
                return replies + ["env_timeout"] * (len(requests) - len(replies))
            try:
                # once for all of them: that is quicker
                with limits.memory_limit(memory), limits.time_limit(limit):
                    for problem, tokens, turns in requests[len(replies) :]:
                        begin = time.monotonic()
                        answers = split_answers(task, tokens, turns)
                        step = task.step(problem, answers)
                        replies.append(None if step.done else encode(step.observation))
            except limits.OutOfTime:  # whoever used little of the limit is asked again
                if time.monotonic() - begin > 0.5 * limit:
                    replies.append("env_timeout")
            except Exception:  # whatever a task's code raises is that episode's failure, no more
                replies.append("env_error")
        return replies

    return Environment(
        encode_prompt=lambda problem: encode(problem["prompt"]),
        respond=respond,
        alphabet=alphabet_of(task),
        stop=task.stop,
        turn_tokens=task.turn_tokens,
        max_turns=task.max_turns,
        beside=task.beside,
        seconds=config.reward_seconds,
    )
