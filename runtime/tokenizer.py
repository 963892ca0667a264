"""runtime/tokenizer.py: text to token ids and back: the vocabulary of a run, run by tiktoken.

`own_tokenizer` has 512 tokens and lies beside this file: 256 bytes, the numbers " 0" to " 99",
frequent pieces of English prose, and two special tokens. `read_tokenizer` makes the same of the
tokenizer.json of a Hugging Face folder. Every text and every byte can be written in either.
Special tokens that stand in a text are ordinary characters: nobody can end a turn by writing one.
"""

import base64
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

import tiktoken

from runtime.config import Config

VOCABULARY = Path(__file__).with_name("vocab.tiktoken")  # a line a token: base64 and rank
END, PAD = 510, 511  # `<|end|>` ends an answer, `<|pad|>` is never generated

# How a text is cut before pairs are merged. Only numbers 0..99 after a space are one piece; every
# other digit stands alone, so that the tasks on digits cost one token a digit. The last
# alternative is there because tiktoken silently drops text that its pattern does not match.
PATTERN = r" [0-9]{1,2}(?![0-9])|[0-9]| ?\p{L}+|(?s:.)"


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary, and which of its tokens mean something else than text."""

    encoding: tiktoken.Encoding
    stop: tuple[int, ...]  # ids that end an answer; a task's own answers end with the first
    before: tuple[int, ...] = ()  # of a chat: what stands before and behind each prompt
    behind: tuple[int, ...] = ()
    form: str | None = None  # "NFC": how Unicode is normalised first

    @property
    def end(self) -> int:
        """The id that ends an answer."""
        return self.stop[0]

    @property
    def size(self) -> int:
        """Ids are smaller than this."""
        return self.encoding.n_vocab

    @cached_property
    def alphabet(self) -> list[int]:
        """All ids that a policy may emit: those that stand for text, and those that end it."""
        return sorted({*self.encoding._mergeable_ranks.values(), *self.stop})

    def encode(self, text: str) -> list[int]:
        """Text to token ids, a list of the caller's own; never a special token."""
        return list(encoded(self, text))

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt as the policy sees it: in a chat, inside its turn."""
        return [*self.before, *encoded(self, text), *self.behind]

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Token ids to bytes (special tokens by name); ValueError for an id of no token."""
        try:
            return self.encoding.decode_bytes(tokens)
        except (KeyError, OverflowError):
            raise ValueError(f"token ids: must be in 0..{self.size - 1}, {tokens!r:.80}") from None


@lru_cache(256)  # the samples of a group share a prompt, and many turns an observation
def encoded(tokenizer: Tokenizer, text: str) -> tuple:
    """Text to token ids; ValueError for half a character (a lone surrogate)."""
    text = unicodedata.normalize(tokenizer.form, text) if tokenizer.form else text
    text.encode()  # tiktoken would replace what is no Unicode
    return tuple(tokenizer.encoding.encode_ordinary(text))


def tokenizer_of(config: Config) -> Tokenizer:
    """The vocabulary of the configured model."""
    return own_tokenizer()


@cache
def own_tokenizer() -> Tokenizer:
    """The project's own, read once, without network and without tiktoken's own cache."""
    lines = [line.split() for line in VOCABULARY.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    special = {"<|end|>": END, "<|pad|>": PAD}
    how = {"pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": special}
    return Tokenizer(tiktoken.Encoding("nanoglm", **how), stop=(END,))
