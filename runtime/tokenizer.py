"""runtime/tokenizer.py: text to token ids and back: the vocabulary of a run.

The project's own lies beside this file, in vocabulary/, and is run by tiktoken: 256 bytes, the
numbers " 0" to " 99", frequent pieces of English prose, and two special tokens. That of a Hugging
Face folder is run by the library `tokenizers`, its chats by the folder's own template: whatever its
files mean, the ids are those of the library.
A prompt is the task's: special tokens in it are parsed, as in transformers. What a policy or a tool
has written is ordinary text: nobody can end a turn by writing the name of a token.
"""

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import tiktoken

from runtime.config import SIZES, Config, blame, require
from runtime.folder import read_json
from tasks import limits

# In its pattern only numbers 0..99 after a space are one piece; every other digit stands alone, so
# that the tasks on digits cost one token a digit.
VOCABULARY = Path(__file__).with_name("vocabulary")
END, PAD = 510, 511  # `<|end|>` ends an answer, `<|pad|>` is never generated

PROBE = "Wenn 7+5=12, then 0.5 < 1; été\n"  # vocabularies that agree on it are taken for one
TEMPLATE_SECONDS = 2.0  # a stranger's template may loop
# GPT-2's vocabularies write each byte as a character: its own, if that is visible
BYTE_OF = dict(enumerate([*range(33), *range(127, 161), 173], 256))


class Tokenizer:
    """A vocabulary: the project's own. `stop` ends an answer, a task's own answers with the first;
    `alphabet` is what a policy may emit: tokens that stand for text, and those of `stop`."""

    def __init__(self):
        facts = read_json(VOCABULARY / "tokenizer.json")
        special = {token["content"]: token["id"] for token in facts["added_tokens"]}
        ranks = {
            token.translate(BYTE_OF).encode("latin-1"): i
            for token, i in facts["model"]["vocab"].items()
            if token not in special
        }
        pattern = facts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        words = {"pat_str": pattern, "mergeable_ranks": ranks, "special_tokens": special}
        self.encoding = tiktoken.Encoding("nanoglm", **words)
        self.size, self.stop, self.alphabet = len(ranks) + 2, (END,), sorted([*range(END), END])

    @property
    def end(self) -> int:
        """The id that ends an answer."""
        return self.stop[0]

    def encode(self, text: str) -> list[int]:
        """Text to token ids, none of them special; ValueError for half a character."""
        return list(encoded(self, text))

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt as the policy sees it: in a chat, inside its turn."""
        return self.encode(text)

    def ids_of(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Token ids to bytes (special tokens by name); ValueError for an id of no token."""
        try:
            return self.encoding.decode_bytes(tokens)
        except (KeyError, OverflowError):
            raise ValueError(f"token ids: must be in 0..{self.size - 1}, {tokens!r:.80}") from None


@lru_cache(256)  # the samples of a group share a prompt, and many turns an observation
def encoded(tokenizer: Tokenizer, text: str) -> tuple:
    """Text to token ids."""
    text.encode()  # a lone surrogate is no Unicode
    return tuple(tokenizer.ids_of(text))


class FolderTokenizer(Tokenizer):
    """The vocabulary of a Hugging Face folder; chat, system, think: as in Config. UserError for a
    folder that `tokenizers` cannot read."""

    def __init__(self, folder: Path, chat: bool = False, system: str = "", think: str = "no"):
        path, facts = folder / "tokenizer.json", read_json(folder / "config.json")
        with blame(f"--model {folder}: must have the package tokenizers", ImportError):
            from tokenizers import Tokenizer as Library
        text = json.dumps(read_json(path))
        with blame(f"{path}: must be what the library tokenizers reads"):
            self.literal, self.parsing = Library.from_str(text), Library.from_str(text)
        self.literal.encode_special_tokens = True
        if (folder / "generation_config.json").exists():
            facts |= read_json(folder / "generation_config.json")
        self.chat, self.think = chat, think == "yes"
        self.system = [{"role": "system", "content": system}] if system else []
        self.size, stop = facts.get("vocab_size", 0), facts.get("eos_token_id", [])
        self.stop = tuple(stop) if isinstance(stop, list) else (stop,)
        if chat:
            self.template, self.names = read_template(folder)
            turn = self.end_of_turn()
            self.stop = (turn, *[i for i in self.stop if i != turn])
        special = {
            i for i, token in self.parsing.get_added_tokens_decoder().items() if token.special
        }
        text_ids = {*self.parsing.get_vocab().values()} - special
        self.alphabet = sorted(text_ids | {*self.stop})
        fits = self.stop and {*self.stop} <= text_ids | special
        require(fits, f"{folder}: eos_token_id {self.stop} is no token")
        most = self.alphabet[-1]
        require(
            most < self.size, f"{path}: ids must be below vocab_size {self.size}, {most} is not"
        )

    def ids_of(self, text: str) -> list[int]:
        return self.literal.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt as transformers encodes it; in a chat by the folder's template."""
        return list(encoded_prompt(self, text))

    def rendered(self, turns: list[dict], begin: bool = True) -> str:
        """Turns of a chat as one text, with the beginning of the answer's."""
        words = {"add_generation_prompt": begin, "enable_thinking": self.think}
        with blame("the chat template fails", (Exception, limits.OutOfTime)):
            with limits.time_limit(TEMPLATE_SECONDS):
                return self.template.render(messages=self.system + turns, **words, **self.names)

    def end_of_turn(self) -> int:
        """The token that the template writes behind an answer."""
        answer = "An answer."
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        rest = self.rendered(turns, begin=False).rpartition(answer)[2]
        ids = self.parsing.encode(rest, add_special_tokens=False).ids
        require(ids, "--chat: must be no with a template that does not end a turn")
        return ids[0]

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Token ids to bytes, as the library decodes them."""
        known = all(self.parsing.id_to_token(token) is not None for token in tokens)
        if not known:
            raise ValueError(f"token ids: must be in 0..{self.size - 1}, {tokens!r:.80}")
        return self.parsing.decode(list(tokens), skip_special_tokens=False).encode()


@lru_cache(256)
def encoded_prompt(tokenizer: FolderTokenizer, text: str) -> tuple:
    """The ids of a prompt; its begin-of-text token is the library's, or the template's."""
    text.encode()
    if not tokenizer.chat:
        return tuple(tokenizer.parsing.encode(text).ids)
    text = tokenizer.rendered([{"role": "user", "content": text}])
    return tuple(tokenizer.parsing.encode(text, add_special_tokens=False).ids)


def read_template(folder: Path) -> tuple:
    """The chat template of a folder, in a sandbox, and the special tokens that it may name."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path, facts = folder / "chat_template.jinja", read_json(folder / "tokenizer_config.json")
    text = path.read_text() if path.is_file() else facts.get("chat_template")
    require(text and isinstance(text, str), f"--chat: must be no, {folder} has no chat template")

    def complain(message: str):
        raise ValueError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.globals["raise_exception"] = complain
    sandbox.globals["strftime_now"] = lambda form: "26 Jul 2024"  # the same in every run
    with blame(f"{folder}: must have a sound chat template"):
        template = sandbox.from_string(text)
    names = {name: facts.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    names = {name: x["content"] if isinstance(x, dict) else x for name, x in names.items()}
    return template, {name: x for name, x in names.items() if x}


def check_folder(folder: Path) -> None:
    """UserError for a file that is read and is none, or a link to elsewhere; those of a hub's cache
    lead to its blobs."""
    blobs = folder.resolve().parent.parent / "blobs"
    for path in folder.glob("[!.]*.*"):
        if path.suffix in (".json", ".safetensors", ".jinja"):
            inside = path.is_file() and path.resolve().parent in (folder.resolve(), blobs)
            must = "must be a file, and no link to another folder (`cp -rL` copies what it means)"
            require(inside, f"{path}: {must}")


def tokenizer_of(config: Config) -> Tokenizer:
    """The vocabulary of the configured model."""
    if config.model in SIZES:
        require(config.chat == "no", f"--chat {config.chat}: must be no with {config.model}")
        return own_tokenizer()
    check_folder(Path(config.model))
    return FolderTokenizer(Path(config.model), config.chat == "yes", config.system, config.think)


@cache
def own_tokenizer() -> Tokenizer:
    """The project's own, read once."""
    return Tokenizer()


def same_words(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two vocabularies are the same, as far as a look tells."""
    facts = [(x.size, x.stop, x.alphabet, x.encode(PROBE)) for x in (one, other)]
    return facts[0] == facts[1]
