"""model.py: the GPT: its weights, and its forward pass over packed sequences.

RMSNorm, learned absolute positions or RoPE, grouped-query attention, SwiGLU, tied or untied
embeddings: with RoPE it is Llama (SmolLM2), with a bias of q, k and v Qwen2, with norms of q and k
Qwen3. Attention is dense (PyTorch's SDPA) or sparse (dsa.py). `naive_forward` is the whole model
for one sequence; the rest computes the same for many at once.
All parameters that are trained are views of ONE flat tensor, their gradients of another: publishing
the weights is one copy, clipping is one norm, the optimizer is one vector operation. What is not
trained (with adapters, methods/lora.py) lies in a second flat tensor.
Left out: generation (cache.py), training, sampling, tokenizers. Token ids in, hidden states out.

Axes: N packed tokens · K rows · B sequences · T cells of each in a grid · M tokens that are read
      d model width · F hidden width · V vocabulary, V' tokens of a task
      H heads: Hq of queries, Hkv of keys and values · D head width · P parameters
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsa
from fast.fused import fused
from fast.kernels import sparse_kernels
from methods.indexer import Indexer
from methods.lora import Adapters

# recomputed(f, *arguments) is f(*arguments), computed once more in the backward pass
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
PAD_BLOCK = 16  # attention over 13 tokens takes longer than over 16, a register of AVX-512


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
    positions: str = "learned"  # "learned" (absolute) or "rope" (the form of Llama)
    qkv_bias: bool = False  # added to queries, keys and values, as in Qwen2
    qk_norm: bool = False  # RMSNorm over each query and key head, as in Qwen3
    tied: bool = True  # one matrix reads tokens and writes logits
    lora: int = 0  # rank of the adapters, which alone are trained; 0: everything is
    rope_base: float = 10_000.0
    rope_scaling: tuple = ()  # Llama 3's: factor, low and high frequency factors, first context
    norm_eps: float = 1e-6
    init_std: float = 0.08  # with 0.02, RL from random weights learns far worse
    attention: str = "dense"  # "dense" or "dsa"
    chunk_size: int = 16  # dsa: keys in a chunk
    top_k: int = 8  # dsa: chunks a query attends to
    scoring: str = "mean"  # dsa: "mean" (pooled keys, no parameters) or "indexer" (learned)
    index_heads: int = 2
    index_width: int = 16
    kernels: str = "auto"  # dsa: "spec" (dsa.py), "triton", or "auto": triton on CUDA

    @property
    def indexed(self) -> bool:
        return self.attention == "dsa" and self.scoring == "indexer"


PRESETS = {
    "tiny": dict(layers=2, width=64, heads=4, kv_heads=2, head_width=16, hidden=160),
    "small": dict(layers=4, width=128, heads=4, kv_heads=1, head_width=32, hidden=512),
    "medium": dict(layers=8, width=320, heads=5, kv_heads=1, head_width=64, hidden=1024),
}


# ---------------------------------------------------------------------------- the naive form


def naive_forward(model: "GPT", tokens: Tensor) -> Tensor:
    """Hidden states [T, d] of ONE sequence of token ids [T], with dense attention."""
    c = model.config
    T = len(tokens)
    mask = torch.ones(T, T).tril().log()  # 0 up to the query's own position, then -inf
    shared = torch.arange(c.heads) // (c.heads // c.kv_heads)  # key head of each query head
    x, rope = model.embed(tokens, torch.arange(T))  # [T, d]
    for layer in model.layers:
        h = rms_norm(x, layer.attention_norm, c)
        q, k, v = layer.heads(h, rope)  # [T, H, D] each
        scores = torch.einsum("qhd,khd->hqk", q, k[:, shared]) / c.head_width**0.5
        weights = (scores + mask).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v[:, shared])
        x = layer.project("attention_out", out.flatten(1), x)
        x = layer.mlp(x)
    return model.norm(x)


# ------------------------------------------------------------------------------ its formulas


def rms_norm(x, weight, config: ModelConfig) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv 1910.07467, eq. 4)."""
    return F.rms_norm(x, weight.shape, weight, config.norm_eps)


def rope_table(config: ModelConfig) -> Tensor:
    """cos and sin of the rotary angles, [2, context, 1, D], halves duplicated as in Llama
    (RoFormer, arXiv 2104.09864, eq. 15).

    With rope_scaling, waves longer than the first context / low are `factor` times as long, those
    shorter than the first context / high as they were, and between them it goes over
    (`_compute_llama3_parameters` of transformers). Angles are rounded to float32, as there: at
    position 1,000 exact ones would be 1e-4 away.
    """
    exponent = torch.arange(0, config.head_width, 2).float() / config.head_width
    frequencies = 1 / config.rope_base**exponent  # radians a token
    if config.rope_scaling:
        factor, low, high, first = config.rope_scaling
        turns = first / (2 * torch.pi / frequencies)  # of each wave in the first context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / factor
    angles = torch.arange(config.context)[:, None] * frequencies
    angles = angles.repeat(1, 2)[:, None]  # [context, 1, D]
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x, cos, sin) -> Tensor:
    """Rotate heads x [N, H, D] by the rows of `rope_table` at their positions, [N, 1, D] each."""
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([-b, a], dim=-1), sin)


def split_heads(qkv, q_norm, k_norm, rope, c: ModelConfig) -> tuple:
    """Queries, keys and values of heads [N, H, D]; queries and keys normed and rotated."""
    q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
    if c.qk_norm:
        q = rms_norm(q, q_norm, c)
        k = rms_norm(k, k_norm, c)
    if rope is not None:
        q = rotate(q, *rope)
        k = rotate(k, *rope)
    return q, k, v


def embedding(tokens: int, width: int) -> nn.Embedding:
    """A table without values yet; `nn.Embedding` would draw some, which on the device "meta" takes
    1.4 s, as torch imports its compiler for that."""
    return nn.Embedding.from_pretrained(torch.empty(tokens, width), freeze=False)


def parameter(*shape: int) -> nn.Parameter:
    """A place without values: `GPT.initialise` or a file gives them."""
    return nn.Parameter(torch.empty(shape))


class Layer(nn.Module):
    """Weights of one block, x + attention(norm x), then x + SwiGLU(norm x) (arXiv 2002.05202);
    `GPT.body` passes through it.

    Matrices are [in, out], which MKL multiplies faster when there are few rows.
    """

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.config = c
        columns = (c.heads + 2 * c.kv_heads) * c.head_width
        self.attention_norm = parameter(c.width)
        self.qkv = parameter(c.width, columns)  # columns [q | k | v]
        self.qkv_bias = parameter(columns) if c.qkv_bias else None
        self.q_norm = parameter(c.head_width) if c.qk_norm else None
        self.k_norm = parameter(c.head_width) if c.qk_norm else None
        if c.indexed:
            self.indexer = Indexer(c.width, c.index_heads, c.index_width)
        self.attention_out = parameter(c.heads * c.head_width, c.width)
        self.mlp_norm = parameter(c.width)
        self.gate_up = parameter(c.width, 2 * c.hidden)  # columns [gate | up]
        self.mlp_out = parameter(c.hidden, c.width)

    def project(self, name: str, x: Tensor, add=None) -> Tensor:
        """x @ W, W the matrix of this name, plus `add`."""
        W = getattr(self, name)
        return x @ W if add is None else torch.addmm(add, x, W)

    def heads(self, h, rope) -> tuple:
        """Queries [N, Hq, D], keys and values [N, Hkv, D] of h [N, d]; rope: (cos, sin) or None."""
        c = self.config
        qkv = self.project("qkv", h, self.qkv_bias).view(len(h), -1, c.head_width)
        split = fused(split_heads, h.is_cuda and rope is not None)
        return split(qkv, self.q_norm, self.k_norm, rope, c)

    def mlp(self, x: Tensor) -> Tensor:
        """x + SwiGLU(norm x), [N, d]."""
        h = rms_norm(x, self.mlp_norm, self.config)
        gate, up = self.project("gate_up", h).chunk(2, dim=-1)  # [N, F] each
        return self.project("mlp_out", F.silu(gate) * up, x)


class AdaptedLayer(Adapters, Layer):
    """A block with low-rank adapters."""


class GPT(nn.Module):
    """The policy: token ids in, hidden states out; `logits` applies the output matrix.

    `flat` [P] holds every parameter that is trained, `flat_grad` [P] its gradient, and `frozen`
    what is not trained (nothing, without LoRA). seed: of the weights; None leaves them to a file.
    """

    def __init__(self, config: ModelConfig, seed: int | None = 0, dtype=torch.float32):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no memory yet
            self.embed_tokens = embedding(config.vocab_size, config.width)
            if config.positions == "learned":
                self.embed_positions = embedding(config.context, config.width)
            block = AdaptedLayer if config.lora else Layer
            self.layers = nn.ModuleList(block(config) for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
            words = self.embed_tokens
            self.output = words if config.tied else embedding(*words.weight.shape)
        self.rope = rope_table(config)
        self.flatten("cpu", dtype)
        if seed is not None:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int, adapters: bool = False) -> None:
        """Normal(0, init_std), divided by sqrt(2 L) where a matrix writes into the residual stream,
        as in GPT-2; norms are 1. Adapters add nothing at first: B is 0. adapters: these only."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            std = self.config.init_std
            if name.endswith(("_a", "_b")):
                p.normal_(std=len(p) ** -0.5, generator=generator)
                p.mul_(name.endswith("_a"))
            elif adapters:
                continue
            elif p.dim() == 2:
                if name.endswith("_out"):
                    std *= (2 * self.config.layers) ** -0.5
                p.normal_(std=std, generator=generator)
            else:
                p.fill_(not name.endswith("bias"))

    def trains(self, name: str) -> bool:
        """Whether a parameter is a view of `flat`, and not of `frozen`."""
        return not self.config.lora or name.endswith(("_a", "_b"))

    def flatten(self, device, dtype: torch.dtype) -> None:
        """Lay all parameters out as views of `flat` and `frozen`, there and in this precision."""
        trained = []  # (module, name, parameter)
        frozen = []
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                views = trained if self.trains(name) else frozen
                views.append((module, name, p.detach()))
        self.flat = lay_out(trained, device, dtype)
        self.frozen = lay_out(frozen, device, dtype)
        for module, name, _ in frozen:
            getattr(module, name).requires_grad_(False)
        self.rope = self.rope.to(device)
        self.__dict__.pop("flat_grad", None)

    @cached_property
    def flat_grad(self) -> Tensor:
        """The gradients [P] of `flat`; there is no memory for them until they are asked for."""
        flat = torch.zeros_like(self.flat)
        # all that can be trained, even what a training stage keeps fixed for now
        trained = [p for name, p in self.named_parameters() if self.trains(name)]
        parts = flat.split([p.numel() for p in trained])
        for p, gradient in zip(trained, parts, strict=True):
            if p.grad is not None:
                gradient.copy_(p.grad.flatten())
            p.grad = gradient.view_as(p)
        return flat

    def __deepcopy__(self, memo: dict) -> "GPT":
        """A copy with flat tensors of its own; plain copies of parameters would be no views."""
        twin = GPT(self.config, None, self.flat.dtype).on(self.flat.device)
        twin.flat.copy_(self.flat)
        twin.frozen.copy_(self.frozen)
        return twin

    def on(self, device, dtype=None) -> "GPT":
        """Move to a device (and a precision), flat tensors included, if it is not there already;
        "cuda" is the current CUDA device."""
        here = self.flat[:0]
        there = here.to(device, dtype or here.dtype)
        if there is not here:
            self.flatten(device, there.dtype)
        return self

    def embed(self, tokens, positions) -> tuple:
        """Input of the first layer [N, d], and (cos, sin) of RoPE, [N, 1, D] each, or None."""
        x = self.embed_tokens(tokens)
        if self.config.positions == "rope":
            return x, self.rope[:, positions].to(x.dtype).unbind()
        return x + self.embed_positions(positions), None

    def body(
        self,
        tokens,  # [N]
        positions,  # [N]
        attend: Callable,  # (layer, q, k, v, index) -> [N, Hq, D]
        rows=None,  # [M]
    ) -> Tensor:
        """All layers -> [N, d]; with `rows`, only their hidden states -> [M, d]: for the other
        tokens the last layer ends with attention, because nothing else of it is read."""
        x, rope = self.embed(tokens, positions)  # [N, d]

        def block(x, number, layer, rows):
            h = rms_norm(x, layer.attention_norm, self.config)
            q, k, v = layer.heads(h, rope)  # [N, H, D] each
            # detached: the policy's loss does not reach the indexer, nor the indexer's the policy
            index = layer.indexer(h.detach(), positions) if self.config.indexed else None
            out = attend(number, q, k, v, index).flatten(1)
            if rows is not None:  # in the last layer: from here on only what is read
                x = x.index_select(0, rows)  # [M, ...]
                out = out.index_select(0, rows)
            x = layer.project("attention_out", out, x)  # x + out @ attention_out
            return layer.mlp(x)

        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = block(x, number, layer, rows if number == last else None)
        return self.norm(x)

    def forward(self, packed: "Packed", rows=None) -> Tensor:
        """Hidden states [N, d] of packed sequences, each attending to itself only; of `rows` [M]
        if given -> [M, d]."""
        attend = attend_packed(self.config, packed)
        return self.body(packed.tokens, packed.positions, attend, rows)

    def logits(self, hidden, alphabet=...) -> Tensor:
        """Logits [N, V'] of the tokens in `alphabet` [V'], by default of all; float32 or better."""
        matrix = self.output.weight  # [V, d]
        if alphabet is ...:
            scores = F.linear(hidden, matrix)
        elif 2 * len(alphabet) < len(matrix) or len(hidden) > self.config.width:
            scores = F.linear(hidden, matrix.index_select(0, alphabet))
        else:  # the logits are fewer numbers than the matrix: these are copied
            scores = F.linear(hidden, matrix).index_select(-1, alphabet)
        return dsa.at_least_float32(scores)


def lay_out(parameters: list, device, dtype: torch.dtype) -> Tensor:
    """Make parameters, (module, name, values) each, views of one new flat tensor, and return it."""
    sizes = [p.numel() for _, _, p in parameters]
    flat = torch.empty(sum(sizes), device=device, dtype=dtype)
    for (module, name, p), view in zip(parameters, flat.split(sizes), strict=True):
        if not p.is_meta:
            view.copy_(p.flatten())
        setattr(module, name, nn.Parameter(view.view_as(p)))
    return flat


# ------------------------------------------------------------------- many sequences at once


class Packed(NamedTuple):
    """Sequences laid end to end, without padding, and the grid in which they attend.

    Dense attention uses the grid: its padding costs little there, while matrix products, which
    dominate at short lengths, never see it. Padding stands after the real tokens, so the causal
    mask hides it. Sparse attention reads the grid's K real cells, row by row. A token may stand in
    several sequences: see `share_prefixes`.
    """

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, position of each token in its own sequence
    grid: Tensor  # [B, T] int64, which of the N stands in each cell; -1: padding
    cell: Tensor  # [N] int64, the first cell in which each token stands


def padded(length: int) -> int:
    """The length, rounded up to a multiple of PAD_BLOCK."""
    return -(-length // PAD_BLOCK) * PAD_BLOCK


def pack_tokens(sequences: list, device="cpu") -> Packed:
    """Lay int arrays or lists of token ids end to end, on `device`."""
    lengths = np.array([len(s) for s in sequences])
    assert lengths.size and lengths.min() > 0, f"empty sequence among lengths {lengths}"
    real = np.arange(padded(lengths.max())) < lengths[:, None]  # [B, T]
    grid = np.full(real.shape, -1)
    grid[real] = np.arange(lengths.sum())
    arrays = (
        np.concatenate(sequences).astype(np.int64),
        real.nonzero()[1],
        grid,
        np.flatnonzero(real),
    )
    return Packed(*(torch.from_numpy(x).to(device) for x in arrays))


def dense_packed(
    q,  # [N, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    packed: Packed,
) -> Tensor:
    """Causal attention inside each packed sequence -> [N, Hq, D].

    Padding cells repeat the first token: no result of theirs is read.
    """
    cells = packed.grid.clamp(min=0).flatten()
    dtype = q.dtype
    spread = [x.index_select(0, cells).unflatten(0, packed.grid.shape) for x in (q, k, v)]
    q, k, v = (x.transpose(1, 2) for x in spread)  # [B, H, T, D]
    if not q.is_cuda:  # of short sequences three times as fast as in bfloat16
        q, k, v = (dsa.at_least_float32(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, packed.cell).to(dtype)


def attend_packed(
    config: ModelConfig,
    packed: Packed,
    capacity=None,
) -> Callable:
    """The attention function of a packed forward: dense or sparse, as the model is configured.

    With a fixed capacity, sparse attention's rounding does not depend on the longest sequence.
    """
    if config.attention == "dense":
        return lambda layer, q, k, v, index: dense_packed(q, k, v, packed)
    real = packed.grid >= 0  # [B, T]
    token_of_row = packed.grid[real]  # [K]
    row_of_token = real.flatten().cumsum(0)[packed.cell] - 1  # [N]
    edges = F.pad(real.sum(1).cumsum(0), (1, 0))  # [B + 1] the row where each sequence starts
    sparse = sparse_kernels(config, edges.device)
    tables = dsa.packed_tables(edges, config.chunk_size, capacity)
    tables = tables._replace(blocks=sparse.plan_blocks(tables))

    def attend(layer, q, k, v, index):
        of_tokens = q, k, v, *(index or ())
        q, k, v, *index = (x.index_select(0, token_of_row) for x in of_tokens)  # [K, ...]
        out = sparse.dsa_attention(q, k, v, tables, config.top_k, index or None)
        return out.index_select(0, row_of_token)

    return attend
