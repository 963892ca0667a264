"""model.py: the GPT, in one file: weights and packed training forward (cache.py: generation).

RMSNorm, learned absolute positions or RoPE, grouped-query attention (optionally with QK-norm),
SwiGLU, tied embeddings; attention is dense (PyTorch SDPA) or sparse (`dsa.py`). `named_weights`
shows every weight under its name and in its shape in Qwen3 checkpoints, so that these map in.
Left out: training, sampling, tokenizers; this file sees token ids and returns hidden states.

All parameters are views into ONE flat tensor, and their gradients into another: publishing the
weights is one copy, clipping is one norm, the optimizer is one fused vector operation.

Axes: N packed tokens, U of them different (`shared_prefixes`) · M, R rows that somebody wants
      B sequences or cache slots · T positions · L layers · d model width
      Hq query heads · Hkv key/value heads · D head width · F hidden width · V vocabulary
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsa

PAD_BLOCK = 16  # padded widths and capacities are rounded up to this


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a GPT; `PRESETS` holds the named ones."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocab_size: int = 512
    context: int = 256
    positions: str = "learned"  # "learned" (absolute) or "rope" (the Qwen3 form)
    qk_norm: bool = False  # RMSNorm over each query and key head, as in Qwen3
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.08  # from random weights 0.02 learns far worse (README, design notes)
    attention: str = "dense"  # "dense" or "dsa"
    chunk_size: int = 16  # dsa: keys in a chunk
    top_k: int = 8  # dsa: chunks a query attends to
    scoring: str = "mean"  # dsa: "mean" (pooled keys, no parameters) or "indexer" (learned)
    index_heads: int = 2
    index_width: int = 16
    kernels: str = "auto"  # dsa: "spec" (dsa.py), "triton", or "auto": triton on CUDA
    dense_below: int = 0  # dsa: models with a shorter context attend densely (bench.py dsa)

    @property
    def indexed(self) -> bool:
        return self.attention == "dsa" and self.scoring == "indexer"


PRESETS = {
    "tiny": dict(layers=2, width=64, heads=4, kv_heads=2, head_width=16, hidden=160),
    "small": dict(layers=4, width=128, heads=4, kv_heads=1, head_width=32, hidden=512),
    "medium": dict(layers=8, width=320, heads=5, kv_heads=1, head_width=64, hidden=1024),
    "gpt2": dict(
        layers=12, width=768, heads=12, kv_heads=12, head_width=64, hidden=2048, vocab_size=50304
    ),
}


class Packed(NamedTuple):
    """Sequences laid end to end, without padding; `pad` maps each token into a padded [B, T] grid.

    Only attention uses the grid: it costs little there, while matrix products, which dominate at
    short lengths, never see padding. Padding lies after the real tokens, so the causal mask hides
    it without any mask tensor.
    """

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, position of each token in its own sequence
    pad: Tensor  # [N] int64, row of each token in the flattened [B * T] grid
    cu_seqlens: Tensor  # [B + 1] int64, where each sequence starts
    shape: tuple[int, int]  # (B, T) of the grid


def pack_tokens(sequences: list, device: torch.device | str = "cpu") -> Packed:
    """Lay int arrays or lists of token ids end to end as one `Packed` batch; its grid is as wide as
    the longest of them, rounded up to PAD_BLOCK: attention over 13 tokens takes longer than over
    16, which fill a register of AVX-512."""
    lengths = torch.tensor([len(s) for s in sequences])
    assert len(sequences) and lengths.min() > 0, f"empty sequence among lengths {lengths.tolist()}"
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    total, longest = int(cu_seqlens[-1]), -(-int(lengths.max()) // PAD_BLOCK) * PAD_BLOCK
    sequence = torch.repeat_interleave(torch.arange(len(sequences)), lengths)  # [N]
    positions = torch.arange(total) - cu_seqlens[sequence]
    tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    pad = sequence * longest + positions
    tensors = (t.to(device) for t in (tokens, positions, pad, cu_seqlens))
    return Packed(*tensors, (len(sequences), longest))


def shared_prefixes(packed: Packed, rows: Tensor) -> tuple[Tensor, Packed, Tensor, Tensor]:
    """Which packed tokens are the same computation, and which sequences say everything.

    Nobody attends to what stands in a sequence behind the last token of `rows` [M]: it is left out,
    and its own row means nothing.

    Returns row [N], the row in 0 .. U-1 of each token; the leaves, which are the sequences that no
    other one begins with (one of each), packed again: K tokens; row [K] of each of those; and
    first [U], where among the leaves' tokens each row first stands.

    Answers to one prompt begin alike, and what lies behind equal prefixes has equal hidden states:
    of N tokens only U differ. In sorted order, a sequence shares with the one before it the longest
    prefix that it shares with any (the prefix tree, read from left to right).
    """
    grid = np.full(packed.shape, -1)
    grid.reshape(-1)[packed.pad.cpu().numpy()] = packed.tokens.cpu().numpy()
    needed = np.zeros(grid.shape, bool)
    needed.reshape(-1)[packed.pad[rows].cpu().numpy()] = True
    grid[~np.logical_or.accumulate(needed[:, ::-1], axis=1)[:, ::-1]] = -1
    # any order that keeps prefixes; in this one the longer comes first, since -1 is all ones
    order = sorted(range(len(grid)), key=lambda b: grid[b].tobytes())
    new = grid[order] >= 0
    new[1:] &= np.logical_or.accumulate(grid[order[1:]] != grid[order[:-1]], axis=1)
    row = np.maximum.accumulate(new * new.cumsum().reshape(new.shape), axis=0) - 1
    leaf = new.any(1)  # brings something new
    real = grid[order][leaf] >= 0
    leaves = pack_tokens([x[x >= 0] for x in grid[order][leaf]], packed.pad.device)
    arrays = (row[np.argsort(order)].reshape(-1), row[leaf][real], np.flatnonzero(new[leaf][real]))
    row, row_of_leaf, first = (torch.from_numpy(x).to(packed.pad.device) for x in arrays)
    return row[packed.pad], leaves, row_of_leaf, first


def dense_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, row=None, first=None) -> Tensor:
    """Causal attention inside each packed sequence: q [N, Hq, D], k and v [N, Hkv, D] -> q's shape.

    With row [N] and first [U] of `shared_prefixes`, q, k, v and what returns have U rows, not N.
    Raises nothing; exact up to rounding, because padding sits behind every real token: so it may
    repeat row 0, and a grid is one gather.
    """
    B, T = packed.shape
    cells = packed.pad.new_zeros(B * T)  # [B * T], the row of each
    cells[packed.pad] = torch.arange(len(q), device=cells.device) if row is None else row
    back = packed.pad if first is None else packed.pad[first]

    def grid(x: Tensor) -> Tensor:  # [rows, H, D] -> [B, H, T, D]
        return x.index_select(0, cells).view(B, T, *x.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(grid(q), grid(k), grid(v), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(B * T, *q.shape[1:]).index_select(0, back)


def rope_table(config: ModelConfig) -> Tensor:
    """cos and signed sin of the rotary angles, [2, context, 1, D], halves duplicated as in Qwen3
    (RoFormer, arXiv 2104.09864, eq. 15, in the rotate-half form)."""
    half = torch.arange(0, config.head_width, 2, dtype=torch.float64) / config.head_width
    angles = torch.arange(config.context, dtype=torch.float64)[:, None] / config.rope_base**half
    cos, sin = angles.cos(), angles.sin()  # [T, D / 2]
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)])[:, :, None].float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [N, H, D] by the rows of `rope_table` at their positions, [N, 1, D] each."""
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([b, a], dim=-1), sin)


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, in place where no gradient is wanted: x [N, d], a [N, F], b [F, d]."""
    return torch.addmm(x, a, b) if torch.is_grad_enabled() else x.addmm_(a, b)


class Layer(nn.Module):
    """One block: x + attention(norm x), then x + SwiGLU(norm x) (arXiv 2002.05202).

    Matrices are [in, out], which MKL multiplies faster when there are few rows. The block is one
    flat function: with a module for each line, decoding spends more on calls than on attention.
    """

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.config, heads = c, c.heads + 2 * c.kv_heads
        self.attention_norm = nn.Parameter(torch.ones(c.width))
        self.qkv = nn.Parameter(torch.empty(c.width, heads * c.head_width))  # columns [q | k | v]
        if c.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(c.head_width))
            self.k_norm = nn.Parameter(torch.ones(c.head_width))
        if c.indexed:
            self.indexer = dsa.Indexer(c.width, c.index_heads, c.index_width)
        self.attention_out = nn.Parameter(torch.empty(c.heads * c.head_width, c.width))
        self.mlp_norm = nn.Parameter(torch.ones(c.width))
        self.gate_up = nn.Parameter(torch.empty(c.width, 2 * c.hidden))  # columns [gate | up]
        self.mlp_out = nn.Parameter(torch.empty(c.hidden, c.width))

    def forward(
        self, x: Tensor, positions: Tensor, rope: tuple | None, attend: Callable, rows=None
    ) -> Tensor:
        """x [N, d] at positions [N] -> [N, d]; the caller supplies attend(q, k, v, index).

        Where attend returns None, nobody wants to know what follows (the last layer of a prefill);
        with `rows` [R], only what follows for these -> [R, d].
        """
        c, w = self.config, self._parameters  # a dict: attributes are slower
        multiply = torch.mul if torch.is_grad_enabled() else Tensor.mul_  # as in add_product
        h = F.rms_norm(x, (c.width,), w["attention_norm"], c.norm_eps)  # [N, d]
        qkv = (h @ w["qkv"]).view(len(x), -1, c.head_width)
        qk, v = qkv.split([c.heads + c.kv_heads, c.kv_heads], dim=1)  # [N, H, D] each
        if c.qk_norm:  # queries and keys at once, each with its own weight
            weights = w["q_norm"].expand(c.heads, -1), w["k_norm"].expand(c.kv_heads, -1)
            qk = multiply(F.rms_norm(qk, (c.head_width,), None, c.norm_eps), torch.cat(weights))
        if rope is not None:
            qk = rotate(qk, *rope)
        q, k = qk.split([c.heads, c.kv_heads], dim=1)
        # the indexer's input is detached: no loss of the policy reaches it, nor its own the rest
        index = self.indexer(h.detach(), positions) if c.indexed else None
        out = attend(q, k, v, index)
        if out is None:
            return x
        if rows is not None:
            x, out = x.index_select(0, rows), out.index_select(0, rows)  # N is R from here on
        x = add_product(x, out.reshape(len(x), -1), w["attention_out"])
        h = F.rms_norm(x, (c.width,), w["mlp_norm"], c.norm_eps)
        gate, up = (h @ w["gate_up"]).chunk(2, dim=-1)  # [N, F] each
        return add_product(x, multiply(F.silu(gate), up), w["mlp_out"])


class GPT(nn.Module):
    """The policy: token ids in, hidden states out; `logits` applies the tied output matrix.

    `flat` [P] holds every parameter, `flat_grad` [P] every gradient; both are made by `flatten`,
    which must be called again after the module has moved to another device or dtype.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        assert config.heads % config.kv_heads == 0, (config.heads, config.kv_heads)
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.context, config.width)
        else:
            self.register_buffer("rope", rope_table(config), persistent=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.initialise(seed)
        self.flatten()

    def initialise(self, seed: int) -> None:
        """Normal(0, init_std), divided by sqrt(2 L) where it writes into the residual stream, as
        in GPT-2."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith("_out")
                shrink = (2 * self.config.layers) ** -0.5 if residual else 1.0
                nn.init.normal_(p, std=self.config.init_std * shrink, generator=generator)

    def flatten(self) -> None:
        """Move every parameter into one flat tensor and its gradient into another."""
        parameters = list(self.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.flat_grad = torch.zeros_like(self.flat)
        start = 0
        for p in parameters:
            stop = start + p.numel()
            p.data = self.flat[start:stop].view_as(p)
            p.grad = self.flat_grad[start:stop].view_as(p)
            start = stop

    def __deepcopy__(self, memo: dict) -> "GPT":
        """A copy with flat tensors of its own; plain copies of parameters would be no views."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        skip = ("flat", "flat_grad")
        state = {name: value for name, value in self.__dict__.items() if name not in skip}
        twin.__dict__.update(copy.deepcopy(state, memo))
        twin.flatten()
        return twin

    def on(self, device: torch.device | str) -> "GPT":
        """Move to a device, flat tensors included; "cuda" is the current CUDA device."""
        if self.flat.device != torch.empty(0, device=device).device:
            self.to(device).flatten()
        return self

    def body(self, tokens: Tensor, positions: Tensor, attends: list[Callable], rows=None) -> Tensor:
        """All layers over tokens [N] at positions [N] -> [N, d]; attends[l](q, k, v, index).

        With `rows` [R], only their hidden states -> [R, d]: of the other tokens, the last layer
        computes keys and values, which is all that anybody wants to know.
        """
        x = self.embed_tokens(tokens)
        rope = None
        if self.config.positions == "rope":
            rope = self.rope[:, positions].unbind()  # cos and sin, [N, 1, D] each
        else:
            x = x + self.embed_positions(positions)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, positions, rope, attend, rows if layer is self.layers[-1] else None)
        return self.norm(x)

    def forward(self, packed: Packed, rows: Tensor | None = None) -> Tensor:
        """Hidden states [N, d] of packed sequences, each attending to itself only.

        With `rows` [M], only theirs -> [M, d]: tokens behind equal prefixes are computed once,
        those that no row attends to not at all, and attention sees only the sequences that are no
        beginning of another.
        """
        if rows is None:
            attend = attend_packed(self.config, packed)
            return self.body(packed.tokens, packed.positions, [attend] * self.config.layers)
        row, leaves, row_of_leaf, first = shared_prefixes(packed, rows)
        wanted, back = row[rows].unique(return_inverse=True)  # [R], [M]
        attend, dense = attend_packed(self.config, leaves), self.config.attention == "dense"

        def attend_leaves(q, k, v, index):  # [U, H, D] each -> [U, Hq, D]
            if dense:
                return dense_packed(q, k, v, leaves, row_of_leaf, first)
            index = index and [x.index_select(0, row_of_leaf) for x in index]
            q, k, v = (x.index_select(0, row_of_leaf) for x in (q, k, v))
            return attend(q, k, v, index).index_select(0, first)

        attends = [attend_leaves] * self.config.layers
        tokens, positions = leaves.tokens[first], leaves.positions[first]
        return self.body(tokens, positions, attends, wanted).index_select(0, back)

    def logits(self, hidden: Tensor, alphabet: Tensor | None = None) -> Tensor:
        """Scores [N, V'] of the tokens in `alphabet` [V'] (all V when None)."""
        weight = self.embed_tokens.weight
        return F.linear(hidden, weight if alphabet is None else weight[alphabet])


def generated_logprobs(
    model: GPT, packed: Packed, rows: Tensor, alphabet: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] and entropies [M] of the tokens at `rows` [M] of a packed batch, with gradient.

    Row r is predicted by row r - 1, so no row may be the first of its sequence. Temperature and
    `alphabet` [V'] are those of the generator; other rows never reach the output matrix.
    """
    hidden = model(packed, rows - 1)  # [M, d]
    column = torch.full((model.config.vocab_size,), -1, device=alphabet.device)
    column[alphabet] = torch.arange(len(alphabet), device=alphabet.device)
    targets = column[packed.tokens[rows]]  # [M]
    logprobs = torch.log_softmax(model.logits(hidden, alphabet) / temperature, -1)  # [M, V']
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def sparse_kernels(config: ModelConfig, device: torch.device) -> Callable | None:
    """The `dsa_attention` to use on this device, None where attention is dense."""
    if config.attention == "dense" or config.context < config.dense_below:
        return None
    if config.kernels == "triton" or (config.kernels == "auto" and device.type == "cuda"):
        from dsa_triton import dsa_attention

        def contiguous(q, k, v, tables, top_k, index=None, means=None):  # what kernels ask for
            index = index and [x.contiguous() for x in index]
            q, k, v = (x.contiguous() for x in (q, k, v))
            return dsa_attention(q, k, v, tables, top_k, index, means)

        return contiguous
    return dsa.dsa_attention


def attend_packed(config: ModelConfig, packed: Packed, capacity: int | None = None) -> Callable:
    """The attention function of a packed forward: dense or sparse, as the model is configured.

    With a fixed capacity, sparse attention's rounding does not depend on the longest sequence.
    """
    sparse = sparse_kernels(config, packed.tokens.device)
    if sparse is None:
        return lambda q, k, v, index: dense_packed(q, k, v, packed)
    tables = dsa.packed_tables(packed.cu_seqlens, config.chunk_size, capacity)
    return lambda q, k, v, index: sparse(q, k, v, tables, config.top_k, index)
