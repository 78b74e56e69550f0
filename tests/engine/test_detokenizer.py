"""Incremental text: equal to decoding at once, stop strings across every border."""

import random

import pytest

from inkling_rocm.engine.detokenizer import Detokenizer, StopStrings
from tests.engine.history_model import ByteTokenizer


class PieceTokenizer(ByteTokenizer):
    """Tokens of one to four bytes that respect no character border."""

    def __init__(self, seed):
        rng = random.Random(seed)
        text = "naïve 日本語 👩‍👩‍👧 ümlaut ¡hola! \U0001f600\u0301 end".encode()
        self.pieces = []
        at = 0
        while at < len(text):
            size = rng.randint(1, 4)
            self.pieces.append(text[at : at + size])
            at += size
        self.pieces += [b"\xff", b"\xe6\x97", b"\xf0\x9f", b"ok"]

    def token_bytes(self, token):
        return self.pieces[token] if token < 256 else b"<%d>" % token


@pytest.mark.parametrize("seed", range(20))
def test_increments_make_the_whole(seed):
    tokenizer = PieceTokenizer(seed)
    rng = random.Random(seed)
    count = len(tokenizer.pieces)
    for ids in (range(count - 4), [rng.randrange(count) for _ in range(40)]):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        parts = [detokenizer.add(i) for i in ids] + [detokenizer.finish()]
        assert "".join(parts) == tokenizer.decode(ids)
        assert not any("\ufffd" in part for part in parts) or "\ufffd" in tokenizer.decode(ids)


def test_special_tokens_are_left_out_or_named():
    for skip, expected in ((True, "ab"), (False, "a<260>b")):
        detokenizer = Detokenizer(ByteTokenizer(), skip_special_tokens=skip)
        assert "".join(map(detokenizer.add, (97, 260, 98))) == expected


def test_half_a_character_becomes_a_replacement_only_at_the_end():
    detokenizer = Detokenizer(ByteTokenizer(), skip_special_tokens=True)
    assert detokenizer.add(0xE6) == detokenizer.add(0x97) == ""
    assert detokenizer.finish() == "\ufffd"


def naive_stop(text, stop, keep):
    found = [(text.find(s), -len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    at, _, matched = min(found)
    return text[: at + len(matched) * keep], matched


@pytest.mark.parametrize("seed", range(200))
def test_stop_strings_against_a_search_in_the_whole_text(seed):
    """A whole-text search on what has arrived: the first prefix that contains a stop decides."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab\n") for _ in range(rng.randrange(40)))
    stop = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 5))) for _ in range(3)]
    keep = rng.random() < 0.5
    matcher, given, shown, matched = StopStrings(stop, keep_match=keep), "", "", None
    while given != text and matched is None:
        piece = text[len(given) : len(given) + rng.randint(1, 4)]
        given += piece
        new, matched = matcher.add(piece)
        shown += new
        expected, expected_match = naive_stop(given, stop, keep)
        assert matched == expected_match
        assert expected.startswith(shown)
        if matched:
            assert shown == expected
        else:
            # Held back: only what could still begin a stop string.
            held = expected[len(shown) :]
            assert not held or any(s.startswith(held) for s in stop)
    if matched is None:
        assert shown + matcher.finish() == text


def test_no_stop_strings_hold_nothing_back():
    matcher = StopStrings((), keep_match=False)
    assert matcher.add("abc") == ("abc", None)
    assert matcher.finish() == ""
