"""unions.py: how alike the lists of neighbouring queries are, in a model that has learned text.

    python bench.py unions

The kernels let neighbours read the union of their lists together (dsa_triton.py), which pays where
it is much shorter than the lists one after the other. A small model learns Python's own library
byte by byte, first in rows of 512, then of 2,048; after that its indexer is warmed up. Then every
query of a longer text that it has not seen selects, and the union of neighbours is counted.
Left out: real models, and time (`python bench.py dsa`, on a GPU).
"""

import sysconfig
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import dsa
from lab.plots import save_result
from model import GPT, ModelConfig
from pretrain import SparseConfig, attention_of, row_batches, train_stage

NEIGHBOURS = (2, 4, 8, 16)
LENGTH = 8192  # bytes that are looked at; in the second half every list is full
WAYS = {  # chunk size, chunks of a list, by the indexer or by means
    "16 chunks of 64, mean keys": (64, 16, False),
    "16 chunks of 64, indexer": (64, 16, True),
    "64 chunks of 16, mean keys": (16, 64, False),
    "2,048 single tokens, indexer": (1, 2048, True),
}
SIZES = {"layers": 4, "width": 128, "heads": 8, "kv_heads": 2, "head_width": 32, "hidden": 384}


def library() -> list[int]:
    """The bytes of Python's own library, file by file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return list(b"\n".join(file.read_bytes() for file in files))


def selections(model: GPT, text: Tensor, chunk_size: int, top_k: int, indexed: bool) -> list:
    """Lists [T, Hs, S] of every layer, of tokens [T] that are read with dense attention."""
    tables, found = dsa.packed_tables(torch.tensor([0, len(text)]), chunk_size), []
    dense = attention_of(model, text[None], "dense")

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, index: tuple) -> Tensor:
        found.append(dsa.select_chunks(q, k, tables, top_k, index if indexed else None))
        return dense(layer, q, k, v, index)

    with torch.no_grad():
        model.body(text, torch.arange(len(text)), attend)
    return found


def union(lists: Tensor, many: int) -> float:
    """Chunks in the union of so many neighbours' lists, over those in one list: the mean.

    lists [T, Hs, S]; only the second half is counted.
    """
    together = lists[len(lists) // 2 :].unflatten(0, (-1, many)).transpose(1, 2).flatten(2)
    distinct = (together.sort(-1).values.diff() != 0).sum(-1) + 1  # [T / many / 2, Hs]
    return round(distinct.double().mean().item() / lists.shape[2], 3)


def bench_unions(folder: Path) -> None:
    """Unions of random weights, and of a model that has learned, layer by layer."""
    result = {"length": LENGTH, "rows": []}
    config = SparseConfig(length=512, tokens=4096, index_lr=0.003)
    shape = {"positions": "rope", "qk_norm": True, "vocab_size": 256, "context": LENGTH}
    indexer = {"attention": "dsa", "scoring": "indexer", "index_heads": 4, "index_width": 32}
    model = GPT(ModelConfig(**SIZES, **shape, **indexer, chunk_size=16), config.seed)
    text = library()
    seen, held_out = text[: -2 * LENGTH], torch.tensor(text[-LENGTH:])

    def look(weights: str) -> None:
        for name, how in WAYS.items():
            layers = selections(model, held_out, *how)
            unions = {many: [union(lists, many) for lists in layers] for many in NEIGHBOURS}
            result["rows"].append({"weights": weights, "lists": name, "union": unions})
        save_result(folder, "unions", result)

    look("random")
    longer = replace(config, length=2048)
    for how, stage, steps in (
        (config, "dense", 600),
        (longer, "dense", 60),
        (longer, "warm-up", 60),
    ):
        train_stage(model, how, stage, steps, row_batches(seen, how))
    look("trained")
