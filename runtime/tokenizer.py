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

VOCABULARY = Path(__file__).with_name("vocab.tiktoken")


VOCAB_SIZE = 512


END, PAD = 510, 511  # `<|end|>` ends an answer, `<|pad|>` is never generated


SPECIAL = ("<|end|>", "<|pad|>")


# How a text is cut before pairs are merged. Only numbers 0..99 after a space are one piece; every
# other digit stands alone, so that the tasks on digits cost one token a digit. The last
# alternative is there because tiktoken silently drops text that its pattern does not match.
PATTERN = r" [0-9]{1,2}(?![0-9])|[0-9]| ?\p{L}+|(?s:.)"


def load_tokenizer(path: str | Path = VOCABULARY) -> tiktoken.Encoding:
    """Read a vocabulary file into a tiktoken Encoding, without network and without a cache.

    ValueError, in one line, unless every line is "base64 rank", the ranks are 0, 1, 2, ..., no
    token appears twice and all 256 single bytes are there (without them tiktoken panics).
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
    return tiktoken.Encoding(
        "nanoglm", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


@cache
def tokenizer() -> tiktoken.Encoding:
    """The project's own tokenizer, read once; ValueError if it does not have VOCAB_SIZE ids."""
    encoding = load_tokenizer()
    if encoding.n_vocab != VOCAB_SIZE:
        raise ValueError(f"{str(VOCABULARY)!r}: {encoding.n_vocab} ids, expected {VOCAB_SIZE}")
    return encoding


def encode(text: str) -> list[int]:
    """Text to token ids; never END or PAD."""
    return list(_encoded(text))


@lru_cache(256)  # samples of a group share their prompt, and observations repeat
def _encoded(text):
    return tuple(tokenizer().encode_ordinary(text))


@cache
def _token_bytes():
    return {t: tokenizer().decode_single_token_bytes(t) for t in range(VOCAB_SIZE)}


def decode_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids to bytes (special tokens by name); ValueError for an id outside the vocabulary."""
    table = _token_bytes()  # a dict, not a list: in a list, id -1 would be the last token
    try:
        return b"".join([table[token] for token in tokens])
    except KeyError as error:
        raise ValueError(f"token id {error} is not in 0..{VOCAB_SIZE - 1}") from None
