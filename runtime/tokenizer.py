"""runtime/tokenizer.py: text to token ids and back: the vocabulary of a run, run by tiktoken.

`own_tokenizer` has 512 tokens and lies beside this file: 256 bytes, the numbers " 0" to " 99",
frequent pieces of English prose, and two special tokens. `read_tokenizer` makes the same of the
tokenizer.json of a Hugging Face folder. Every text and every byte can be written in either.
Special tokens that stand in a text are ordinary characters: nobody can end a turn by writing one.
"""

import base64
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

import tiktoken

from runtime.config import SIZES, Config, UserError, require
from runtime.folder import read_json, refuse_links

VOCABULARY = Path(__file__).with_name("vocab.tiktoken")  # a line a token: base64 and rank
END, PAD = 510, 511  # `<|end|>` ends an answer, `<|pad|>` is never generated

# How a text is cut before pairs are merged. Only numbers 0..99 after a space are one piece; every
# other digit stands alone, so that the tasks on digits cost one token a digit. The last
# alternative is there because tiktoken silently drops text that its pattern does not match.
PATTERN = r" [0-9]{1,2}(?![0-9])|[0-9]| ?\p{L}+|[\s\S]"
# That of GPT-2, which tokenizer.json does not write out.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LARGEST = 1 << 27  # bytes of tokenizer.json
CHAT = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")

# The character by which a vocabulary of GPT-2's kind writes each byte: its own, if that is visible.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [value for value in range(256) if value not in VISIBLE]
BYTE_OF = {chr(value): value for value in VISIBLE}
BYTE_OF |= {chr(256 + place): value for place, value in enumerate(HIDDEN)}
# Parts of tokenizer.json that change a text or its tokens -> what they may be, if they are there.
ONLY = {
    "normalizer": (None, {"type": "NFC"}),
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
    "type": ("BPE",),
    "add_prefix_space": (False,),
    "behavior": ("Isolated",),
    "invert": (False,),
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
    if config.model in SIZES:
        return in_chat(own_tokenizer(), config.chat)
    return read_tokenizer(Path(config.model), config.chat)


@cache
def own_tokenizer() -> Tokenizer:
    """The project's own, read once, without network and without tiktoken's own cache."""
    lines = [line.split() for line in VOCABULARY.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    special = {"<|end|>": END, "<|pad|>": PAD}
    how = {"pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": special}
    return Tokenizer(tiktoken.Encoding("nanoglm", **how), stop=(END,))


# ------------------------------------------------------------------ that of a Hugging Face folder


def read_tokenizer(folder: Path, chat: str = "no") -> Tokenizer:
    """The vocabulary of a Hugging Face folder, a byte-level BPE; UserError for another kind."""
    refuse_links(folder)
    path, facts = folder / "tokenizer.json", read_json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        facts |= read_json(folder / "generation_config.json")
    found = read_json(path, LARGEST)
    try:
        tokenizer = converted(found, facts)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        needed = "must be a byte-level BPE of the usual form"
        raise UserError(f"{path}: {needed} ({error!r:.200})") from error
    return in_chat(tokenizer, chat)


def converted(found: dict, facts: dict) -> Tokenizer:
    """tokenizer.json for tiktoken; facts: of the model. Almost any error for what is odd.

    tiktoken merges whatever pair makes the token of the lowest id. That is what a list of merges
    says, if its order is that of the ids, and each token is made as `halves` makes it.
    """
    steps, parts = found["pre_tokenizer"], dict(found)
    steps = steps.get("pretokenizers", [steps])
    for step in (*steps, found["model"]):
        parts |= step
    gpt2 = parts.get("use_regex", True)
    kinds = [step["type"] for step in steps]
    require(kinds == ["Split", "ByteLevel"][gpt2:], f"pre_tokenizer is {kinds}")
    for name, allowed in ONLY.items():
        value = parts.get(name, allowed[0])
        require(value in allowed, f"{name} is {value!r:.80}")

    special = {token["content"]: token["id"] for token in parts["added_tokens"]}
    plain = [token["id"] for token in parts["added_tokens"] if not token["special"]]
    others = {*special.values()}  # they may stand among the text, too
    ranks = {spelled(token): i for token, i in parts["vocab"].items() if i not in others}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in parts["merges"]]
    pairs = [[spelled(a), spelled(b)] for a, b in pairs]
    made = [ranks[a + b] for a, b in pairs]
    require(made == sorted({*made}), "merges are not in the order of the vocabulary")
    odd = [pair for pair in pairs if halves(b"".join(pair), ranks) != pair]
    require(not odd, f"merging never joins {odd[:1]}")
    whole = {bytes([value]) for value in range(256)} <= ranks.keys()
    whole = whole and len(ranks) == 256 + len(pairs)
    require(whole, "vocabulary is not all bytes and what merges make of them")

    ids, stop = [*ranks.values(), *special.values()], facts.get("eos_token_id")
    size, stop = facts["vocab_size"], stop if isinstance(stop, list) else [stop]
    require(len(ids) == len({*ids}), "two tokens have one id")
    require(0 <= min(ids) <= max(ids) < size, f"ids reach {max(ids)}, vocab_size is {size}")
    require(stop and {*stop} <= {*ids}, f"eos_token_id {stop} is no token")
    pattern = GPT2 if gpt2 else parts["pattern"]["Regex"]
    pattern = rf"{pattern}|(?:(?!{pattern})[\s\S])+"  # tiktoken drops what is not matched
    how = {"pat_str": pattern, "mergeable_ranks": ranks, "special_tokens": special}
    encoding = tiktoken.Encoding("folder", **how)
    form = "NFC" if parts.get("normalizer") else None
    return Tokenizer(encoding, tuple(stop), plain=tuple(plain), form=form)


def spelled(token: str) -> bytes:
    """The bytes of a token that is written in visible characters."""
    return bytes([BYTE_OF[character] for character in token])


def halves(token: bytes, ranks: dict) -> list[bytes]:
    """The two tokens that byte-pair merging joins last to make this one; more if it never does."""
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, 1 << 32) for a, b in pairwise(parts)]
        place = pairs.index(min(pairs))
        if pairs[place] >= ranks[token]:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def in_chat(tokenizer: Tokenizer, chat: str) -> Tokenizer:
    """The vocabulary with every prompt in a turn of Qwen3's chat, and the answer's turn begun."""
    if chat == "no":
        return tokenizer
    try:
        start, end, think, thought = [tokenizer.encoding._special_tokens[name] for name in CHAT]
    except KeyError as error:
        needed = f"must be no with this --model, whose vocabulary has no {error}"
        raise UserError(f"--chat {chat}: {needed}") from error
    behind = [end, *tokenizer.encode("\n"), start, *tokenizer.encode("assistant\n")]
    if chat == "answer":  # it has thought already
        space = tokenizer.encode("\n\n")
        behind += [think, *space, thought, *space]
    return replace(tokenizer, before=(start,), opening="user\n", behind=tuple(behind))


def to_json(tokenizer: Tokenizer) -> dict:
    """The tokenizer.json of our own vocabulary."""
    character = {value: name for name, value in BYTE_OF.items()}

    def spell(token):
        return "".join([character[value] for value in token])

    ranks, special = tokenizer.encoding._mergeable_ranks, tokenizer.encoding._special_tokens
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": name, "special": True} | flags for name, i in special.items()]
    merges = [[*map(spell, halves(token, ranks))] for token in ranks if len(token) > 1]
    cut = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    vocabulary = {spell(token): i for token, i in ranks.items()}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [cut, level | {"use_regex": False}],
        },
        "decoder": level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
