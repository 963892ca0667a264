"""runtime/tokenizer.py: text to token ids and back, with a vocabulary of 512 that lies beside it.

Byte-pair encoding, run by tiktoken: 256 bytes, the numbers " 0" to " 99", frequent pieces of
English prose, and two special tokens. Every text and every byte can be written in it.
Special tokens that stand in a text are ordinary characters: nobody can end a turn by writing one.
"""

import base64
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import tiktoken

VOCABULARY = Path(__file__).with_name("vocab.tiktoken")  # a line a token: base64 and rank
VOCAB_SIZE = 512
END, PAD = 510, 511  # `<|end|>` ends an answer, `<|pad|>` is never generated

# How a text is cut before pairs are merged. Only numbers 0..99 after a space are one piece; every
# other digit stands alone, so that the tasks on digits cost one token a digit. The last
# alternative is there because tiktoken silently drops text that its pattern does not match.
PATTERN = r" [0-9]{1,2}(?![0-9])|[0-9]| ?\p{L}+|(?s:.)"


@cache
def tokenizer() -> tiktoken.Encoding:
    """The project's own tokenizer, read once, without network and without tiktoken's own cache."""
    lines = [line.split() for line in VOCABULARY.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    special = {"<|end|>": END, "<|pad|>": PAD}
    how = {"pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": special}
    return tiktoken.Encoding("nanoglm", explicit_n_vocab=VOCAB_SIZE, **how)


@lru_cache(256)  # the samples of a group share a prompt, and many turns an observation
def encoded(text: str) -> tuple:
    """Text to token ids; never END or PAD."""
    return tuple(tokenizer().encode_ordinary(text))


def encode(text: str) -> list[int]:
    """Text to token ids, a list of the caller's own; never END or PAD."""
    return list(encoded(text))


def decode_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids to bytes (special tokens by name); ValueError for an id outside the vocabulary."""
    unknown = [token for token in tokens if not 0 <= token < VOCAB_SIZE]
    if unknown:
        raise ValueError(f"token id {unknown[0]} is not in 0..{VOCAB_SIZE - 1}")
    return tokenizer().decode_bytes(tokens)
