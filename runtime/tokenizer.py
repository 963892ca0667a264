"""runtime/tokenizer.py."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import tiktoken

VOCABULARY = Path(__file__).with_name("vocab.tiktoken")


VOCAB_SIZE = 512


END, PAD = 510, 511  # `<|end|>` ends an answer, `<|pad|>` is never generated


SPECIAL = ("<|end|>", "<|pad|>")


# tiktoken silently drops text that its pattern does not match, hence the last alternative. Only
# numbers 0..99 after a space are one piece; every other digit stands alone, so that the tasks on
# digits cost one token per digit.
PATTERN = r" [0-9]{1,2}(?![0-9])|[0-9]| ?\p{L}+|(?s:.)"


def load_tokenizer(path: str | Path = VOCABULARY) -> tiktoken.Encoding:
    """Reads a vocabulary file into a tiktoken Encoding, without network and without a cache.

    Its name holds the sha256 of everything that decides token ids (`tokenizer_hash`). Raises a
    one-line ValueError unless every line is "base64 rank", the ranks are 0, 1, 2, ..., no token
    appears twice and all 256 single bytes are there (without them tiktoken panics).
    """
    where = f"vocabulary {str(path)!r}"
    try:
        lines = [line.split() for line in Path(path).read_bytes().splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: each line must be 'base64 rank' ({error})") from None
    if list(ranks.values()) != list(range(len(lines))):
        raise ValueError(f"{where}: ranks must be 0, 1, 2, ... and every token different")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ValueError(f"{where}: all 256 bytes must be tokens, {missing[0]} is not")
    special = {name: len(ranks) + i for i, name in enumerate(SPECIAL)}
    name = "nanoglm-" + hashlib.sha256(repr((ranks, PATTERN, special)).encode()).hexdigest()
    return tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


@cache
def tokenizer() -> tiktoken.Encoding:
    """The project's own tokenizer, read once; ValueError if it does not have VOCAB_SIZE ids."""
    encoding = load_tokenizer()
    if encoding.n_vocab != VOCAB_SIZE:
        raise ValueError(f"{str(VOCABULARY)!r}: {encoding.n_vocab} ids, expected {VOCAB_SIZE}")
    return encoding


def tokenizer_hash(encoding: tiktoken.Encoding) -> str:
    """The sha256 (64 hex digits) of vocabulary, pattern and special tokens."""
    return encoding.name.rpartition("-")[2]


def encode(text: str) -> list[int]:
    """Text to token ids; special tokens written in the text are ordinary characters."""
    return list(_encoded(text))


@lru_cache(256)  # the samples of a group share a prompt, and many turns an observation
def _encoded(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode_ordinary(text))


@cache
def _token_bytes() -> dict[int, bytes]:
    return {t: tokenizer().decode_single_token_bytes(t) for t in range(VOCAB_SIZE)}


def decode_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids to bytes (special tokens by name); ValueError for an id outside the vocabulary."""
    table = _token_bytes()  # a dict, not a list: in a list, id -1 would be the last token
    try:
        return b"".join([table[token] for token in tokens])
    except KeyError as error:
        raise ValueError(f"token id {error} is not in 0..{VOCAB_SIZE - 1}") from None
