"""The tokenizer by behaviour: round trips, and the vocabulary file.

The vocabulary file is a product of `build_vocabulary` below; to write it again:
`python -c "import tests.test_tokenizer as t; t.VOCABULARY.write_bytes(t.build_vocabulary())"`
"""

import base64
import random
import time

import pytest

from runtime.tokenizer import END, PAD, VOCABULARY, own_tokenizer

VOCAB_SIZE = 512
encode, decode_bytes = own_tokenizer().encode, own_tokenizer().decode_bytes


def tokenizer():
    return own_tokenizer().encoding


# In merge order (`_` is a space): byte-pair merges learned on English prose (docstrings, manuals)
# in which the words of the tasks were made frequent.
FRAGMENTS = """
_t _a re in _th er _s on es or _the _c en at ed _i _f _re _o al le _b _w ing se an ion st _m _p ess
_to ct _n _an th _is _d ver _in ro ort _e gu ar _of ent _h il am as un _sort verse od guess _reverse
_be ch et ur _st it _l ut _and ad ul ce _for ck qu um _v us om ect _wh is pt ith ap all lo est _con
_as _or pe im ot _ex ue _it ag _are ame ment _on id iv ic _with ex _pro _if ction _that _by cess el
ass res and _g ab bj ber ring _de ill ist ult bject ption _al _us ation _fi if urn umber api turn ri
con up alue rom ly _object ow port _return ore _call ol _will _from _not unction ode ter ack
"""


def build_vocabulary() -> bytes:
    tokens = [bytes([value]) for value in range(256)]
    tokens += [f" {number}".encode() for number in range(100)]
    tokens += [fragment.replace("_", " ").encode() for fragment in FRAGMENTS.split()]
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens))


def test_the_vocabulary_file_is_the_one_described():
    assert VOCABULARY.read_bytes() == build_vocabulary(), "write it again, see the docstring"
    encoding = tokenizer()
    assert encoding.n_vocab == VOCAB_SIZE == 512
    assert encoding.encode("<|end|><|pad|>", allowed_special="all") == [END, PAD]


def test_every_token_can_be_reached_by_merging():
    ranks = tokenizer()._mergeable_ranks
    for token, rank in ranks.items():
        parts = [bytes([value]) for value in token]
        while len(parts) > 1:  # byte-pair merging, without tiktoken's look-up of whole pieces
            pairs = [ranks.get(a + b, 10**9) for a, b in zip(parts, parts[1:], strict=False)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] == 10**9:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        assert parts == [token], f"{token} cannot be reached, merging stops at {parts}"
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
    start = time.perf_counter()
    for text in ["a" * 300_000, "7" * 100_000, "é " * 50_000]:
        assert decode_bytes(encode(text)) == text.encode()
    assert time.perf_counter() - start < 3, "encoding is no longer linear in the length"


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**9])
def test_unknown_token_ids_are_refused(token):
    with pytest.raises(ValueError, match=rf"0\.\.511, \[5, {token}\]"):
        decode_bytes([5, token])
