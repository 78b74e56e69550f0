"""What the engine refuses before it runs anything, each refusal with its parameter and reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from inkling_rocm.engine.request import RequestError, SamplingParams

MAX_CONTINUATIONS = 128
_RANGES = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "n")
_REALS = (*_RANGES, "repetition_penalty")


def token_ids(given: Any, name: str) -> list[int]:
    """A prompt's ids as a list of int. Raises: RequestError: it is something else."""
    ids = None
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping | Set):
        ids = list(given)
    # By type, not by token: asking Integral of every token of a large batch takes longer than
    # starting its first step.
    if ids is None or not all(
        issubclass(kind, Integral) and kind is not bool for kind in set(map(type, ids))
    ):
        raise RequestError(
            f"{name} {given!r:.100}: wanted a list of token ids, or a list of such", param=name
        )
    return list(map(int, ids))


def check_request(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    logprobs: int | None,
    context_length: int,
    vocabulary: int,
    has_tokenizer: bool,
) -> None:
    """Raises: RequestError: the first thing that is wrong. Args: params: plain_params'."""
    _check_ids(prompt_ids, vocabulary)
    _check_lengths(len(prompt_ids), params, context_length)
    _check_sampling(params, vocabulary)
    if logprobs is not None and not 0 <= logprobs <= vocabulary:
        raise RequestError(f"logprobs {logprobs}: wanted 0 .. {vocabulary}", param="logprobs")
    if not has_tokenizer:
        text_only = ("stop", "json_schema", "regex", "json_object", "grammar")
        for name in text_only:
            if getattr(params, name):
                raise RequestError(
                    f"{name} needs a tokenizer; the engine runs with skip_tokenizer_init",
                    param=name,
                )


def plain_params(params: SamplingParams) -> SamplingParams:
    """The parameters with numbers of Python's own types. In the engine's thread others (a fraction,
    numpy's integers) and what no float holds would end the whole batch.

    Raises: RequestError: a value has a wrong type.
    """
    for name in ("json_schema", "regex", "grammar"):
        if not isinstance(value := getattr(params, name), str | None):
            raise RequestError(f"{name} {value!r}: wanted a string", param=name)
    if isinstance(params.stop, str) or not all(isinstance(stop, str) for stop in params.stop):
        raise RequestError(f"stop {params.stop!r}: wanted a tuple of strings", param="stop")
    numbers: dict[str, Any] = {name: integer(name, getattr(params, name)) for name in _INTEGERS}
    numbers |= {name: _real(name, getattr(params, name)) for name in _REALS}
    return replace(
        params,
        **numbers,
        seed=None if params.seed is None else integer("seed", params.seed),
        logit_bias={
            integer("logit_bias", token): _real("logit_bias", bias)
            for token, bias in params.logit_bias.items()
        },
        stop_token_ids=tuple(integer("stop_token_ids", i) for i in params.stop_token_ids),
        constraint_start_ids=tuple(
            integer("constraint_start_ids", i) for i in params.constraint_start_ids
        ),
    )


def integer(name: str, value: Any) -> int:
    """Raises: RequestError: it is none."""
    if not isinstance(value, Integral):
        raise RequestError(f"{name} {value!r}: wanted an integer", param=name)
    return int(value)


def _real(name: str, value: Any) -> float:
    if not isinstance(value, Real):
        raise RequestError(f"{name} {value!r}: wanted a number", param=name)
    try:
        return float(value)
    except OverflowError as error:
        raise RequestError(f"{name} is beyond the numbers a float holds", param=name) from error


def _check_ids(prompt_ids: Sequence[int], vocabulary: int) -> None:
    if not prompt_ids:
        raise RequestError("the prompt is empty", code="empty_prompt", param="prompt")
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise RequestError(
            f"prompt token {wrong}: the model's tokens are 0 .. {vocabulary - 1}", param="prompt"
        )


def _check_lengths(prompt: int, params: SamplingParams, context_length: int) -> None:
    if params.max_new_tokens < 0:
        raise RequestError(
            f"max_new_tokens {params.max_new_tokens}: wanted at least 0", param="max_new_tokens"
        )
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        raise RequestError(
            f"min_new_tokens {params.min_new_tokens}: wanted 0 .. max_new_tokens "
            f"({params.max_new_tokens})",
            param="min_new_tokens",
        )
    wanted = prompt + params.max_new_tokens
    if wanted > context_length:
        raise RequestError(
            f"the prompt's {prompt} tokens and max_new_tokens {params.max_new_tokens} make "
            f"{wanted}; this engine holds {context_length} tokens a sequence",
            code="context_length_exceeded",
            param="prompt" if prompt >= context_length else "max_new_tokens",
        )


def _check_sampling(params: SamplingParams, vocabulary: int) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if not low <= value <= high or not math.isfinite(value):
            raise RequestError(f"{name} {value}: wanted {low} .. {high}", param=name)
    if not 0 < params.repetition_penalty < math.inf:
        raise RequestError(
            f"repetition_penalty {params.repetition_penalty}: wanted more than 0",
            param="repetition_penalty",
        )
    if params.top_k < 1 and params.top_k not in (-1, 0):
        raise RequestError(f"top_k {params.top_k}: wanted at least 1, or -1 for all", param="top_k")
    if not 1 <= params.n <= MAX_CONTINUATIONS:
        raise RequestError(f"n {params.n}: wanted 1 .. {MAX_CONTINUATIONS}", param="n")
    if params.seed is not None and not -(1 << 63) <= params.seed < 1 << 63:
        raise RequestError(f"seed {params.seed}: wanted a signed 64-bit number", param="seed")
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("constraint_start_ids", params.constraint_start_ids),
    ):
        wrong = [token for token in ids if not 0 <= token < vocabulary]
        if wrong:
            raise RequestError(
                f"{name}: token {wrong[0]} is not in 0 .. {vocabulary - 1}", param=name
            )
    for token, bias in params.logit_bias.items():
        if math.isnan(bias):
            raise RequestError(f"logit_bias of token {token} is not a number", param="logit_bias")
    if any(not stop for stop in params.stop):
        raise RequestError("an empty stop string would end every output", param="stop")
