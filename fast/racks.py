"""racks.py: rows that grow, so that a cache takes about what sequences use.

A rack has rows of one length: the first (32 positions) has one for every slot; a sequence that
outgrows its row moves to a rack with longer ones (64, 128, ..., the capacity), about as many as
were ever needed at once; racks never shrink. A step reads the rows in use. For `sum`, whose longest
episodes are many times longer than most, 64 slots take less than 0.35 of slots times capacity.
`prefill_groups` fills rows with prompts.

Axes: B slots · n rows of a rack, T positions of each · L layers · Hkv heads · D head width
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cache import Cache, attend_rows, empty_rows, make_cache, prefill
from model import GPT, ModelConfig, padded
from runtime.config import Config

SHORT = 32  # positions of the shortest rows


@dataclass(eq=False)
class Rack:
    """Rows of one length, the first `used` in use; `slots` tells whose sequence lies in each."""

    kv: Tensor  # [2, L, n, T, Hkv, D] keys and values
    slots: Tensor  # [n]
    used: int


def make_racks(model: GPT, slots: int, capacity: int) -> Cache:
    """An empty cache with racks; a plain one for sparse attention, where all rows are short, and on
    a GPU, where flash decoding reads no more of a row than is used."""
    T = padded(capacity)
    lengths = [SHORT << i for i in range(16) if SHORT << i < T / 2] + [T]
    if model.config.attention == "dsa" or len(lengths) == 1 or model.flat.is_cuda:
        return make_cache(model, slots, capacity)
    numbers = torch.arange(slots, device=model.flat.device)
    racks = []
    for length in lengths:
        rows = 0 if racks else slots
        racks.append(Rack(empty_rows(model, rows, length), numbers[:rows].clone(), rows))
    first = np.zeros(slots, np.int64)
    return Racks(racks[0].kv, T, None, None, None, racks, first, np.arange(slots), numbers)


@dataclass(eq=False)
class Racks(Cache):
    """A cache of which every sequence lies in a row of the shortest rack that it fits into."""

    racks: list = ()  # by length
    rack: np.ndarray = None  # [B] in which rack its sequence lies, and in which row
    row_in_rack: np.ndarray = None  # [B]
    place: Tensor = None  # [B] this row's number, counted across racks

    def row(self, slot: int, length: int) -> list:
        """See `Cache.row`."""
        kv = self.racks[self.rack[slot]].kv[:, :, self.row_in_rack[slot]]
        return [x[:, :length] for x in kv]

    def reserve(self, lengths):
        """Give every slot the shortest row that has so many positions [B]; a sequence that has
        grown moves with its keys."""
        wanted = np.searchsorted([rack.kv.shape[3] for rack in self.racks], lengths)
        changed = np.flatnonzero(wanted != self.rack).tolist()
        for slot in changed:
            self.move(slot, wanted[slot])
        if changed:
            before = np.cumsum([0] + [rack.used for rack in self.racks])
            self.place.copy_(torch.from_numpy(before[self.rack] + self.row_in_rack))

    def move(self, slot: int, to: int):
        """Move a slot's sequence to another rack, which may get more rows."""
        old, new = self.racks[self.rack[slot]], self.racks[to]
        if new.used == len(new.slots):  # half as many rows again, and one
            more = min(new.used // 2 + 1, len(self.rack) - new.used)
            longer = F.pad(new.kv.transpose(3, 4), (0,) * 7 + (more,))
            new.kv, new.slots = longer.transpose(3, 4), F.pad(new.slots, (0, more))
        old_row, new_row = self.row_in_rack[slot], new.used
        new.used += 1
        new.slots[new_row] = slot
        copy_row(old, old_row, new, new_row)
        old.used -= 1  # its last row fills the gap: those in use stay together
        last = int(old.slots[old.used])
        copy_row(old, old.used, old, old_row)
        old.slots[old_row], self.row_in_rack[last] = last, old_row
        self.rack[slot], self.row_in_rack[slot] = to, new_row

    def attention(self, config: ModelConfig, positions: Tensor) -> Callable:
        """See `Cache.attention`: rack by rack."""
        parts = []  # slots of a rack's rows, and their attention
        for rack in self.racks:
            if n := rack.used:
                slots = rack.slots[:n]
                parts.append((slots, attend_rows(rack.kv[:, :, :n], config, positions[slots])))

        def attend(layer, q, k, v, index):
            outs = [part(layer, q[slots], k[slots], v[slots]) for slots, part in parts]
            return torch.cat(outs).index_select(0, self.place)

        return attend


def copy_row(old: Rack, row, new: Rack, to):
    """Keys and values of a sequence, as many as fit."""
    known = old.kv[:, :, row, : new.kv.shape[3]]
    new.kv[:, :, to, : known.shape[2]] = known


def prefill_groups(
    model: GPT,
    cache: Cache,
    prompts,  # slot -> (group id, tokens)
    known,  # group id -> its prompt's keys and values so far
    config: Config,
) -> None:
    """Fill slots whose prompts many share: a prompt is computed once a group, then copied.

    In an evaluation, whose greedy answers may depend on their company, as many prompts as a
    micro-batch holds go together: the 128 of SmolLM2 take 10 seconds in place of 49.
    """
    if config.temperature == 0:
        sequences = [tokens for _, tokens in prompts.values()]
        together = config.token_budget // cache.capacity or 1
        return prefill(model, cache, [*prompts], sequences, together)
    for slot, (group, tokens) in prompts.items():
        row = cache.row(slot, len(tokens))
        if group not in known:
            prefill(model, cache, [slot], [tokens])
            known[group] = [x.clone() for x in row]
        for part, ready in zip(row, known[group], strict=True):
            part.copy_(ready)
