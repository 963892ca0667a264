"""The tokenizer by behaviour: round trips, and the vocabulary file.

Those of Hugging Face folders are compared with the tokenizers library.
"""

import json
import random
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from model_folders import REASON, SPECIAL, TEMPLATE, trained_tokenizer

from reward import make_task
from runtime.config import UserError
from runtime.tokenizer import END, PAD, FolderTokenizer, own_tokenizer
from tasks import limits

VOCAB_SIZE = 512


def tokenizer():
    return own_tokenizer().encoding


def encode(text: str) -> list[int]:
    return own_tokenizer().encode(text)


def decode_bytes(tokens: list[int]) -> bytes:
    return own_tokenizer().decode_bytes(tokens)


def merge(token: bytes, ranks: dict) -> list[bytes]:
    """Byte-pair merging with the tokens that come before this one: what it is made of."""
    parts = [bytes([value]) for value in token]
    while len(parts) > 1:
        pairs = [ranks.get(a + b, 10**9) for a, b in zip(parts, parts[1:], strict=False)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= ranks[token]:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def test_the_vocabulary_has_its_two_special_tokens():
    encoding = tokenizer()
    assert encoding.n_vocab == VOCAB_SIZE == 512
    assert encoding.encode("<|end|><|pad|>", allowed_special="all") == [END, PAD]


def test_every_token_can_be_reached_by_merging():
    ranks = tokenizer()._mergeable_ranks
    for token, rank in ranks.items():
        parts = merge(token, ranks)
        assert len(parts) == min(2, len(token)), f"{token}: merging stops at {parts}"
        if rank >= 256:
            assert encode(token.decode()) == [rank]


def test_numbers_words_and_signs_are_the_pieces_that_the_tasks_count_on():
    numbers = [encode(f" {n}") for n in range(100)]
    assert all(len(ids) == 1 for ids in numbers)
    assert encode("".join(f" {n}" for n in range(100))) == [ids[0] for ids in numbers]
    for text in ["guess", " reverse", " sort", "<", ">", "?", "=", "+", ";", *"0123456789"]:
        assert len(encode(text)) == 1, text
    for text, pieces in [
        ("42", ["4", "2"]),
        (" 123", [" ", "1", "2", "3"]),
        (" 12345", [" ", "1", "2", "3", "4", "5"]),
        (" 7;", [" 7", ";"]),
        ("a 12b", ["a", " 12", "b"]),
    ]:
        assert [decode_bytes([t]).decode() for t in encode(text)] == pieces


def test_round_trip_of_any_text():
    rng = random.Random(0)
    ranges = [(0, 32), (32, 127), (0x80, 0x250), (0x660, 0x66A), (0x2000, 0x2070), (0xE000, 0xE010)]
    ranges += [(0x10000, 0x10FFFF), (0x300, 0x370), (0x1F600, 0x1F650), (48, 58), (9, 14)]
    for _ in range(400):
        text = "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(60)))
        ids = encode(text)
        assert decode_bytes(ids) == text.encode(), "the pattern dropped something"
        assert all(0 <= t < END for t in ids)
    for text in ["<|end|>", "a<|pad|>b", "\x00\r\n\t \u3000\u2028", " " * 50, "ſ" * 40, "x" * 100]:
        assert decode_bytes(encode(text)) == text.encode()
        assert END not in encode(text) and PAD not in encode(text)


def test_round_trip_of_any_bytes_and_of_long_text():
    data = random.Random(1).randbytes(5000)
    table = {tokenizer().decode_single_token_bytes(t): t for t in range(END)}
    assert decode_bytes([table[bytes([value])] for value in data]) == data
    with limits.time_limit(60.0):  # it is linear in the length
        for text in ["a" * 300_000, "7" * 100_000, "é " * 50_000]:
            assert decode_bytes(encode(text)) == text.encode()


@cache
def facts_of() -> dict:
    return json.loads(trained_tokenizer(1998))


CUT = {  # what a folder may want done with every text
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    | {"pad_id": 0, "pad_type_id": 0, "pad_token": SPECIAL[0]},
}


def write_tokenizer(path: Path, facts: dict, stop=0, vocab_size=2000, template=TEMPLATE) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(facts))
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "eos_token_id": stop}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def many_texts(count: int) -> list[str]:
    """Random texts of many scripts, with what is likely to go wrong."""
    rng, root = random.Random(0), Path(__file__).parent.parent
    code = (root / "model.py").read_text()
    ranges = [(32, 127), (0xC0, 0x250), (0x4E00, 0x9FA5), (0x620, 0x64A), (0x1F600, 0x1F64F)]
    ranges += [(48, 58), (9, 14), (0x300, 0x370), (0x900, 0x980), (0xAC00, 0xD7A3), (0x660, 0x66A)]
    ranges += [(0x2000, 0x2030), (0x1F1E6, 0x1F1FF), (0xE000, 0xE010), (0x10000, 0x10080), (0, 32)]
    odd = [
        *SPECIAL,
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "’s",
        "e\u0301",
        "ſ",
    ]
    odd += "\u00a0|\u3000|\u200d|ﬁ|Å|\u212b|\u1e9b\u0323|한|12345|3.14|\x85".split("|")

    def part():
        way = rng.random()
        if way < 0.2:
            return rng.choice(odd)
        if way < 0.5:
            begin = rng.randrange(len(code))
            return code[begin : begin + rng.randrange(40)]
        letters = rng.choice(ranges)
        return "".join(chr(rng.randrange(*letters)) for _ in range(rng.randrange(1, 12)))

    return ["".join(part() for _ in range(rng.randrange(1, 8))) for _ in range(count)]


def test_ids_are_those_of_the_library(tmp_path):
    """Special tokens in the text of a policy or a tool are ordinary characters."""
    tokenizers = pytest.importorskip("tokenizers", reason=REASON)
    folder = write_tokenizer(tmp_path, facts_of() | CUT)
    ours, theirs = FolderTokenizer(folder), tokenizers.Tokenizer.from_str(trained_tokenizer(1998))
    theirs.encode_special_tokens = True
    texts = many_texts(2_000)
    for text, wanted in zip(texts, theirs.encode_batch(texts), strict=True):
        ids = ours.encode(text)
        assert ids == wanted.ids and not {0, 1, 2} & {*ids}
        decoded = unicodedata.normalize("NFC", ours.decode_bytes(ids).decode())
        assert decoded == unicodedata.normalize("NFC", text)
    assert ours.stop == (0,) and {*ours.alphabet} == {*range(2000)} - {1, 2}
    with pytest.raises(UnicodeError, match="surrogates"):
        ours.encode("half \ud83d of a character")


@pytest.mark.parametrize(
    "chat, system, think", [(False, "", "no"), (True, "", "yes"), (True, "Be brief.", "no")]
)
def test_ids_of_prompts_are_those_of_transformers(tmp_path, chat, system, think):
    """By the folder's own template, whose end of a turn is a stop token, too."""
    transformers = pytest.importorskip("transformers", reason=REASON)
    folder = write_tokenizer(tmp_path, facts_of() | CUT)
    ours = FolderTokenizer(folder, chat, system, think)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ["x", "\n\nx", " \n", "a <|im_end|> b", "What is 2+2?", *many_texts(200)]:
        turns = [{"role": "system", "content": system}] if system else []
        turns += [{"role": "user", "content": text}]
        wanted = theirs(text).input_ids
        if chat:
            words = {"add_generation_prompt": True, "return_dict": False}
            words["enable_thinking"] = think == "yes"
            wanted = theirs.apply_chat_template(turns, **words)
        assert ours.encode_prompt(text) == wanted, text
    assert ours.stop == ((2, 0) if chat else (0,)) and {*ours.stop} < {*ours.alphabet}
    task = make_task("reverse:4", 0, ours)
    alone = make_task("reverse:4", 0, FolderTokenizer(folder))
    assert task.max_prompt_tokens >= alone.max_prompt_tokens + len(ours.encode_prompt(""))


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BAD = {
    "not a tokenizer": ({"model": None}, {}, "must be what the library tokenizers reads"),
    "no token ends an answer": (
        {},
        {"stop": 5000},
        "eos_token_id .2, 5000. and tokenizer.json must",
    ),
    "few rows": ({}, {"vocab_size": 1999}, "must have ids below vocab_size 1999"),
    "no template": ({}, {"template": None}, "has no sound chat template"),
    "no template language": ({}, {"template": "{% if"}, "has no sound chat template"),
    "a template that loops": ({}, {"template": LOOP}, "the chat template fails"),
    "a template that reads files": (
        {},
        {"template": "{{ messages.__class__.__mro__[1].__subclasses__() }}"},
        "the chat template fails",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_cannot_be_used_costs_one_line(tmp_path, name, monkeypatch):
    pytest.importorskip("tokenizers", reason=REASON)
    changes, settings, words = BAD[name]
    monkeypatch.setattr("runtime.tokenizer.TEMPLATE_SECONDS", 0.2)
    with pytest.raises(UserError, match=words):
        FolderTokenizer(write_tokenizer(tmp_path, facts_of() | changes, **settings), chat=True)


def test_without_the_library_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json: must be what the library tokenizers"):
        FolderTokenizer(tmp_path)


def test_the_stop_tokens_of_generation_config_count(tmp_path):
    pytest.importorskip("tokenizers", reason=REASON)
    write_tokenizer(tmp_path, facts_of(), stop=0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert FolderTokenizer(tmp_path).stop == (2, 0)
    spaced = TEMPLATE.replace("<|im_end|>", " <|im_end|>")  # as Llama 2 has it
    write_tokenizer(tmp_path, facts_of(), template=spaced)
    assert FolderTokenizer(tmp_path, chat=True).stop == (2, 0)
