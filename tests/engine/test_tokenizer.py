"""The released tokenizer behind the engine's interface."""

import pytest

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.constraint import ConstraintCompiler
from inkling_rocm.engine.detokenizer import Detokenizer
from inkling_rocm.engine.tokenizer import InklingTokenizer

TEXT = "Zażółć gęślą jaźń — 日本語, 👩‍👩‍👧 and <|end_message|> in plain text\n"
END_SAMPLING, END_TEXT, END_MESSAGE = 200006, 199999, 200010


@pytest.fixture(scope="module")
def tokenizer():
    return InklingTokenizer()


def test_text_round_trips_and_names_of_special_tokens_are_text(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert not any(map(tokenizer.is_special, ids))


def test_increments_equal_the_whole(tokenizer):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    parts = [detokenizer.add(token) for token in tokenizer.encode(TEXT)]
    assert "".join(parts) + detokenizer.finish() == TEXT
    assert not any("\ufffd" in part for part in parts)


def test_special_ids(tokenizer):
    assert tokenizer.eos_ids == (END_SAMPLING, END_TEXT)
    names = tokenizer.special_ids
    assert names["content_model_end_sampling"] == END_SAMPLING
    assert names["endoftext"] == END_TEXT
    assert names["end_message"] == END_MESSAGE == tokenizer.block_end_ids[0]
    assert len(names) == 60
    assert tokenizer.vocab_size == max(names.values()) + 1
    assert tokenizer.token_bytes(END_SAMPLING) == b"<|content_model_end_sampling|>"


def test_rows_that_are_no_tokens_have_no_text(tokenizer):
    assert tokenizer.token_bytes(200058) == tokenizer.token_bytes(201023) == b""


def test_json_on_the_real_vocabulary(tokenizer):
    """Every token of a document is permitted, the turn end exactly at its end."""
    compiler = ConstraintCompiler(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size)
    constraint = compiler.compile(SamplingParams(json_object=True))
    for token in tokenizer.encode('{"name": "Zoë", "list": [1, 2.5e3, null]}'):
        allowed = constraint.allowed()
        assert allowed[token]
        assert not allowed[[END_SAMPLING, END_TEXT, END_MESSAGE]].any()
        assert constraint.add(token) is None
    allowed = constraint.allowed()
    assert allowed[[END_SAMPLING, END_TEXT, END_MESSAGE]].all()
    assert constraint.add(END_MESSAGE) is None
    assert constraint.allowed().nonzero()[0].tolist() == sorted((END_SAMPLING, END_TEXT))
