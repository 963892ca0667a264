"""runtime/tokenizer.py: text to token ids and back: the vocabulary of a run.

The project's own lies beside this file, in vocabulary/, and is run by tiktoken: 256 bytes, the
numbers " 0" to " 99", frequent pieces of English prose, and two special tokens. That of a Hugging
Face folder is run by the library `tokenizers`, its chats by the folder's own template: whatever its
files mean, the ids are those of the library.
A prompt is the task's: special tokens in it are parsed, as in transformers. What a policy or a tool
has written is ordinary text: nobody can end a turn by writing the name of a token.
"""

import copy
from collections.abc import Sequence
from functools import cache
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
READ = (".json", ".safetensors", ".jinja")  # what is read of a folder
TEMPLATE_SECONDS = 2.0  # a stranger's template may loop


class Tokenizer:
    """A vocabulary: the project's own. Each token of `stop` ends an answer; a task ends its own
    with the first. `alphabet`: what a policy may emit, tokens of text and those of `stop`."""

    def __init__(self):
        facts = read_json(VOCABULARY / "tokenizer.json")
        words = facts["model"]["vocab"]
        cut, _ = facts["pre_tokenizer"]["pretokenizers"]
        self.encoding = tiktoken.Encoding(
            "nanoglm",
            pat_str=cut["pattern"]["Regex"],
            # a token is written in letters, one a byte, and the id of a letter is the byte
            mergeable_ranks={bytes(map(words.get, word)): i for word, i in words.items()},
            special_tokens={"<|end|>": END, "<|pad|>": PAD},
        )
        self.size = self.encoding.n_vocab
        self.stop = (END,)
        self.alphabet = [*range(PAD)]

    @property
    def end(self) -> int:
        """The id that ends an answer."""
        return self.stop[0]

    def encode(self, text: str) -> list[int]:
        """Text to token ids, none of them special; ValueError for half a character."""
        text.encode()  # a lone surrogate is no Unicode
        return self.encoding.encode_ordinary(text)

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt as the policy sees it: in a chat, inside its turn."""
        return self.encode(text)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Token ids to bytes, special tokens by name."""
        return self.encoding.decode_bytes(tokens)


class FolderTokenizer(Tokenizer):
    """The vocabulary of a Hugging Face folder; chat, system, think: as in Config. UserError for a
    folder that `tokenizers` cannot read."""

    def __init__(self, folder: Path, chat: bool = False, system: str = "", think: str = "no"):
        path = folder / "tokenizer.json"
        facts = read_json(folder / "config.json")
        with blame(f"{path}: must be what the library tokenizers reads"):
            from tokenizers import Tokenizer as Library

            self.parsing = Library.from_file(str(path))
        self.parsing.no_truncation()  # whatever the folder wants: a task says how long a prompt is
        self.parsing.no_padding()
        self.literal = copy.deepcopy(self.parsing)
        self.literal.encode_special_tokens = True
        if (folder / "generation_config.json").exists():
            facts |= read_json(folder / "generation_config.json")
        self.chat = chat
        self.think = think == "yes"
        self.system = [{"role": "system", "content": system}] if system else []
        self.size = facts.get("vocab_size", 0)
        stop = facts.get("eos_token_id", [])
        stop = stop if isinstance(stop, list) else [stop]
        if chat:
            with blame(f"--chat: must be no, {folder} has no sound chat template"):
                self.template = read_template(folder)
                stop = [self.end_of_turn(), *stop]
        self.stop = tuple(dict.fromkeys(stop))
        added = self.parsing.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        ids = {*self.parsing.get_vocab().values()} - special | {*stop}
        fits = stop and all(type(i) is int and 0 <= i < self.size for i in ids)
        wrong = f"eos_token_id {stop} and {path.name} must have ids below vocab_size {self.size}"
        require(fits, f"{folder}: {wrong}")
        self.alphabet = sorted(ids)

    def encode(self, text: str) -> list[int]:
        """Text to token ids, none of them special; ValueError for half a character."""
        text.encode()
        return self.literal.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt as transformers encodes it; in a chat by the folder's template, which writes the
        begin-of-text token itself."""
        if self.chat:
            text = self.rendered([{"role": "user", "content": text}])
        return self.parsing.encode(text, add_special_tokens=not self.chat).ids

    def rendered(self, turns: list[dict], begin: bool = True) -> str:
        """Turns of a chat as one text, with the beginning of the answer's."""
        how = {"add_generation_prompt": begin, "enable_thinking": self.think}
        with blame("the chat template fails", (Exception, limits.OutOfTime)):
            with limits.time_limit(TEMPLATE_SECONDS):
                return self.template.render(messages=self.system + turns, **how)

    def end_of_turn(self) -> int:
        """The token that the template writes behind an answer."""
        answer = "An answer."
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        rest = self.rendered(turns, begin=False).rpartition(answer)[2]
        return self.parsing.encode(rest.strip(), add_special_tokens=False).ids[0]

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Token ids to bytes, as the library decodes them."""
        return self.parsing.decode(list(tokens), skip_special_tokens=False).encode()


def read_template(folder: Path):
    """The chat template of a folder, in a sandbox where it may name the special tokens; almost any
    error where there is none."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path = folder / "chat_template.jinja"
    facts = read_json(folder / "tokenizer_config.json")
    text = path.read_text() if path.is_file() else facts["chat_template"]
    named = {name: x for name, x in facts.items() if x and name.endswith("_token")}
    named = {name: x["content"] if isinstance(x, dict) else x for name, x in named.items()}
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.globals["strftime_now"] = lambda form: "26 Jul 2024"  # the same in every run
    return sandbox.from_string(text, named)


def check_folder(folder: Path) -> None:
    """UserError for a link to elsewhere; those of a hub's cache lead to its blobs."""
    home = folder.resolve()
    read = [path for path in folder.glob("[!.]*.*") if path.suffix in READ]
    for path in read:
        inside = path.resolve().parent in (home, home.parent.parent / "blobs")
        must = "must be no link to another folder (`cp -rL` copies what it means)"
        require(inside, f"{path}: {must}")


def tokenizer_of(config: Config) -> Tokenizer:
    """The vocabulary of the configured model."""
    if config.model in SIZES:
        require(config.chat == "no", f"--chat {config.chat}: must be no with {config.model}")
        return own_tokenizer()
    check_folder(Path(config.model))
    return FolderTokenizer(Path(config.model), config.chat == "yes", config.system, config.think)


own_tokenizer = cache(Tokenizer)  # the project's own, read once


def same_words(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two vocabularies are the same, as far as a look tells."""
    facts = [(x.size, x.stop, x.alphabet, x.encode(PROBE)) for x in (one, other)]
    return facts[0] == facts[1]
