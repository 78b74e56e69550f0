"""Structured output: what a grammar permits, and when the turn may end."""

import json
import re

import jsonschema
import pytest

from inkling_rocm.engine import RequestError, SamplingParams
from inkling_rocm.engine.constraint import MAX_GRAMMAR_BYTES, Constraint, ConstraintCompiler
from tests.engine.history_model import (
    ANSWER,
    BLOCK_END,
    EOS,
    VOCAB,
    ByteTokenizer,
    add_request,
    assert_empty,
    history_core,
    run_to_end,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler():
    return ConstraintCompiler(ByteTokenizer(), (EOS,), VOCAB + 4)


def compile_(compiler, **params):
    return compiler.compile(SamplingParams(**params))


def follow(constraint, ids):
    for token in ids:
        assert constraint.allowed()[token], f"{token} is not permitted"
        assert constraint.add(token) is None


def test_the_end_is_permitted_exactly_when_the_grammar_is_complete(compiler):
    constraint = compile_(compiler, regex="ab?")
    assert constraint.allowed().nonzero()[0].tolist() == [97]
    follow(constraint, b"a")
    assert constraint.allowed().nonzero()[0].tolist() == [98, EOS, BLOCK_END]
    follow(constraint, b"b")
    assert constraint.allowed().nonzero()[0].tolist() == [EOS, BLOCK_END]
    follow(constraint, [BLOCK_END])
    assert constraint.allowed().nonzero()[0].tolist() == [EOS]
    follow(constraint, [EOS])
    assert constraint.allowed().nonzero()[0].tolist() == [EOS]


def test_rows_beyond_the_tokenizer_are_never_permitted(compiler):
    allowed = compile_(compiler, regex=r"(.|\n)*").allowed()
    assert len(allowed) == VOCAB + 4
    assert not allowed[VOCAB:].any()
    assert allowed[:128].all()


def test_nothing_is_constrained_before_a_start_id(compiler):
    constraint = compile_(compiler, regex="a+", constraint_start_ids=(ANSWER,))
    assert constraint.allowed() is None
    follow_free = [5, BLOCK_END, 7]
    for token in follow_free:
        assert constraint.add(token) is None
    assert constraint.allowed() is None
    constraint.add(ANSWER)
    assert constraint.allowed().nonzero()[0].tolist() == [97]


def test_a_grammar_names_special_tokens(compiler):
    grammar = f'start: "a" <[{ANSWER}]> "b" <[{BLOCK_END}]> "c"'
    constraint = compile_(compiler, grammar=grammar)
    for token in (97, ANSWER, 98, BLOCK_END, 99):
        assert constraint.allowed().nonzero()[0].tolist() == [token]
        assert constraint.add(token) is None
    assert constraint.allowed().nonzero()[0].tolist() == [EOS]


def test_a_copy_goes_its_own_way(compiler):
    constraint = compile_(compiler, regex="ab|ac")
    follow(constraint, b"a")
    twin = constraint.copy()
    follow(constraint, b"b")
    assert twin.allowed().nonzero()[0].tolist() == [98, 99]


def test_white_space_cannot_go_on_for_ever(compiler):
    constraint = compile_(compiler, json_schema=json.dumps(SCHEMA))
    pretty = json.dumps({"ok": True, "n": 7}, indent=4)
    follow(constraint, pretty.encode())
    constraint = compile_(compiler, json_object=True)
    follow(constraint, b"{ ")
    assert not constraint.allowed()[ord(" ")]


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": "not json"},
        {"json_schema": '{"type": "objct"}'},
        {"json_schema": '{"type": 5}'},
        {"regex": "(["},
        {"grammar": "start: nothing"},
        {"json_schema": json.dumps({"enum": ["x" * MAX_GRAMMAR_BYTES]})},
        {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)},
        {"regex": "half a pair: \ud800"},
    ],
    ids=lambda params: ascii(params)[:40],
)
def test_invalid_constraints_are_refused_before_anything_runs(engine, params):
    with pytest.raises(RequestError) as caught:
        engine.generate("x", params)
    assert caught.value.code == "invalid_schema"
    assert caught.value.param == next(iter(params))


LOOK_AROUND = "look-around, including look-ahead and look-behind, is not supported"


@pytest.mark.parametrize(
    ("params", "end"),
    [
        ({"regex": "(?=a)b"}, LOOK_AROUND),
        ({"regex": "(?=a)b" + "c" * 400}, LOOK_AROUND),
        ({"json_schema": json.dumps({"type": "string", "pattern": "^(?!a)b$"})}, LOOK_AROUND),
        ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_is_wrong_with_a_constraint_is_told(compiler, params, end):
    with pytest.raises(RequestError) as caught:
        compile_(compiler, **params)
    assert str(caught.value).endswith(end)
    assert len(str(caught.value)) < 700


def test_constraints_exclude_each_other(engine):
    with pytest.raises(RequestError, match="exclude each other"):
        engine.generate("x", {"regex": "a", "json_object": True})


@pytest.mark.parametrize("seed", range(6))
def test_sampled_json_obeys_its_schema(engine, seed):
    params = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 200, "sampling_seed": seed}
    result = engine.generate("x", params)
    assert result["meta_info"]["finish_reason"]["type"] == "stop"
    jsonschema.validate(json.loads(result["text"]), SCHEMA)


def test_greedy_penalised_and_repeated_output_obeys_a_regex(engine):
    pattern = "[a-c]{6}-[0-9]{4}"
    params = {"regex": pattern, "n": 4, "max_new_tokens": 40, "frequency_penalty": 1.0}
    for result in engine.generate("x", {**params, "sampling_seed": 3}):
        assert re.fullmatch(pattern, result["text"])
    assert re.fullmatch(pattern, engine.generate("x", {**params, "n": 1, "temperature": 0})["text"])


def test_masks_that_exclude_each_other_are_an_error(engine):
    with pytest.raises(RuntimeError, match="exclude each other"):
        engine.generate("x", {"regex": "a", "max_new_tokens": 9, "min_new_tokens": 4})


class ExhaustedMatcher:
    """A parser that hit one of its limits after two tokens."""

    def __init__(self):
        self.left = 2

    def deep_copy(self):
        return ExhaustedMatcher()

    def compute_bitmask(self):
        return b"\xff" * 40

    def consume_token(self, token):
        self.left -= 1
        return True

    def is_error(self):
        return self.left <= 0

    def get_error(self):
        return "lexer fuel exhausted\n<state>a page</state><grammar>all of it</grammar>"


def test_a_parser_limit_ends_its_own_request_only():
    core = history_core()
    constraint = Constraint(
        ExhaustedMatcher(), start_ids=(), turn_end_ids=(EOS,), block_end_ids=(), vocabulary=VOCAB
    )
    params = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    bad = add_request(core, 1, [1], params, constraint=constraint)
    good = add_request(core, 2, [1], params)
    run_to_end(core)
    assert good.handle.reasons() == {0: "length"}
    assert bad.handle.reasons() == {0: "error"}
    assert len(bad.handle.tokens()) == 2
    assert bad.handle.updates[-1].error.endswith("lexer fuel exhausted")
    assert_empty(core)


def test_preemption_keeps_the_grammars_state():
    """Little room: requests are preempted in the middle of their JSON and go on."""
    compiler = ConstraintCompiler(ByteTokenizer(), (EOS,), VOCAB)
    schema = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 4})
    outputs = []
    for tokens in (4096, 64):
        core = history_core(max_total_tokens=tokens, page_size=1)
        params = SamplingParams(max_new_tokens=44, seed=2, json_schema=schema, n=3)
        request = add_request(core, 1, [1] * 15, params, constraint=compiler.compile(params))
        run_to_end(core)
        outputs.append([request.handle.tokens(i) for i in range(3)])
        preempted = core.scheduler.preemptions
    assert preempted
    assert outputs[0] == outputs[1]
