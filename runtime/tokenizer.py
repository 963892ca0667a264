"""runtime/tokenizer.py: text to token ids and back: the vocabulary of a run, run by tiktoken.

`read_tokenizer` makes it from the tokenizer.json of a Hugging Face folder. The project's own lies
beside this file, in vocabulary/, and has 512 tokens: 256 bytes, the numbers " 0" to " 99", frequent
pieces of English prose, and two special tokens. Every text and every byte can be written in either.
Special tokens that stand in a text are ordinary characters: nobody can end a turn by writing one.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path

import tiktoken

from runtime.config import SIZES, Config, blame, require, require_only
from runtime.folder import read_json, refuse_links

# In its pattern only numbers 0..99 after a space are one piece; every other digit stands alone, so
# that the tasks on digits cost one token a digit.
VOCABULARY = Path(__file__).with_name("vocabulary")
END, PAD = 510, 511  # `<|end|>` ends an answer, `<|pad|>` is never generated

LARGEST = 1 << 27  # bytes of tokenizer.json
PROBE = "Wenn 7+5=12, then 0.5 < 1; été\n"  # vocabularies that agree on it are taken for one
CHAT = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")

# A vocabulary of GPT-2's kind writes each byte as a character: its own, if that is visible.
BYTE_OF = dict(enumerate([*range(33), *range(127, 161), 173], 256))  # those that are not
ONLY = {  # parts of tokenizer.json that change a text or its tokens -> their only value
    "normalizer": {"type": "NFC"},
    "dropout": 0.0,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "byte_fallback": False,
    "type": "BPE",
    "add_prefix_space": False,
    "use_regex": False,
    "behavior": "Isolated",
    "invert": False,
}


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary, and which of its tokens mean something else than text."""

    encoding: tiktoken.Encoding
    stop: tuple[int, ...]  # ids that end an answer; a task's own answers end with the first
    plain: tuple[int, ...] = ()  # special ids that an answer may have in it, as <think>
    before: tuple[int, ...] = ()  # of a chat: what stands before and behind each prompt
    opening: str = ""  # of a chat: text that is encoded as one with the prompt
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
        return sorted({*self.encoding._mergeable_ranks.values(), *self.plain, *self.stop})

    def encode(self, text: str) -> list[int]:
        """Text to token ids, a list of the caller's own; never a special token."""
        return list(encoded(self, text))

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt as the policy sees it: in a chat, inside its turn."""
        return [*self.before, *encoded(self, self.opening + text), *self.behind]

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
    tokenizer, folder = own_tokenizer(), Path(config.model)
    if config.model not in SIZES:
        refuse_links(folder)
        tokenizer = read_tokenizer(folder)
    return in_chat(tokenizer, config.chat)


@cache
def own_tokenizer() -> Tokenizer:
    """The project's own, read once."""
    return read_tokenizer(VOCABULARY)


def same_words(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two vocabularies are the same, as far as a look tells."""
    facts = [(x.size, x.stop, x.plain, x.form, x.encode(PROBE)) for x in (one, other)]
    return facts[0] == facts[1]


# -------------------------------------------------------------------------- Hugging Face folders


def read_tokenizer(folder: Path) -> Tokenizer:
    """The vocabulary of a Hugging Face folder, a byte-level BPE; UserError for another kind."""
    path, facts = folder / "tokenizer.json", read_json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        facts |= read_json(folder / "generation_config.json")
    found = read_json(path, LARGEST)
    with blame(f"{path}: must be a byte-level BPE of the usual form"):
        return converted(found, facts)


def converted(found: dict, facts: dict) -> Tokenizer:
    """tokenizer.json for tiktoken; facts: of the model. Almost any error for what is odd.

    tiktoken merges whatever pair makes the token of the lowest id. That is what the merges say if
    they are those of training, in the order of their ids.
    """
    cut, level = found["pre_tokenizer"]["pretokenizers"]
    kinds = [cut["type"], level["type"]]
    require(kinds == ["Split", "ByteLevel"], f"pre_tokenizer is {kinds}")
    parts = {"use_regex": True} | found | cut | level | found["model"]
    require_only(parts, ONLY)

    special = {token["content"]: token["id"] for token in parts["added_tokens"]}
    plain = [token["id"] for token in parts["added_tokens"] if not token["special"]]
    others = {*special.values()}  # they may stand among the text, too
    ranks = {spelled(token): i for token, i in parts["vocab"].items() if i not in others}
    made = [bytes([value]) for value in range(256)]
    # a pair is a list of two, or "one two"
    made += [spelled("".join(pair).replace(" ", "")) for pair in parts["merges"]]
    require({*made} == ranks.keys(), "vocab must be all bytes and what is merged of them")
    order = [ranks[token] for token in made[256:]]
    require(order == sorted(order), "merges must be in the order of their ids")

    ids, stop = [*ranks.values(), *special.values()], facts["eos_token_id"]
    size, stop = facts["vocab_size"], stop if isinstance(stop, list) else [stop]
    fit = len(ids) == len({*ids}) and 0 <= min(ids) <= max(ids) < size
    require(fit, f"ids must differ and be below vocab_size {size}, the largest is {max(ids)}")
    require(stop and {*stop} <= {*ids}, f"eos_token_id {stop} is no token")
    pattern = cut["pattern"]["Regex"]
    pattern = rf"{pattern}|(?:(?!{pattern})[\s\S])+"  # tiktoken drops what is not matched
    encoding = tiktoken.Encoding(
        "folder", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    form = "NFC" if parts["normalizer"] else None
    return Tokenizer(encoding, tuple(stop), tuple(plain), form=form)


def spelled(token: str) -> bytes:
    """The bytes of a token that is written in visible characters."""
    return token.translate(BYTE_OF).encode("latin-1")


def in_chat(tokenizer: Tokenizer, chat: str) -> Tokenizer:
    """The vocabulary with every prompt in a turn of Qwen3's chat, and the answer's turn begun."""
    if chat == "no":
        return tokenizer
    with blame(f"--chat {chat}: must be no with this --model, whose vocabulary lacks a token"):
        start, end, think, thought = [tokenizer.encoding._special_tokens[name] for name in CHAT]
    behind = [end, *tokenizer.encode("\n"), start, *tokenizer.encode("assistant\n")]
    if chat == "answer":  # it has thought already
        space = tokenizer.encode("\n\n")
        behind += [think, *space, thought, *space]
    return replace(tokenizer, before=(start,), opening="user\n", behind=tuple(behind))
