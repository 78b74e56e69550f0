"""OpenAI's sampling fields as the engine's SamplingParams."""

from __future__ import annotations

from typing import Any

from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import MAX_STOPS, NativeSampling, SamplingBody

_NATIVE = ("min_new_tokens", "no_stop_trim", "skip_special_tokens", "json_schema", "regex")


def sampling_params(
    body: SamplingBody | NativeSampling, *, max_new_tokens: int, vocab_size: int, **extra: Any
) -> SamplingParams:
    """Build the engine's parameters.

    Args:
        max_new_tokens: limit already resolved from the endpoint's own fields.
        vocab_size: real vocabulary rows, for logit_bias. extra: further SamplingParams fields; they
            win over the body's.

    Raises:
        ApiError: 400, a value the model cannot take.
    """
    fields: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop": stop_strings(body),
        "logit_bias": _logit_bias(body, vocab_size),
    }
    seed = body.seed
    if seed is None and isinstance(body, NativeSampling):
        seed = body.sampling_seed
    optional: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": -1 if body.top_k == 0 else body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "n": body.n,
        # Clients send any 64-bit integer; the engine's seeds (seed + i for continuation i) are
        # counted from 0.
        "seed": None if seed is None else seed & (2**62 - 1),
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
    }
    if isinstance(body, SamplingBody):
        optional["min_new_tokens"] = body.min_tokens
    else:
        optional |= {name: getattr(body, name) for name in _NATIVE}
    fields |= {name: value for name, value in optional.items() if value is not None}
    return SamplingParams(**(fields | extra))


def stop_strings(body: SamplingBody | NativeSampling) -> tuple[str, ...]:
    """The stop strings; OpenAI's limit is 4, ours 16."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise ApiError(
            f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed.",
            code="invalid_value",
            param="stop",
        )
    return tuple(stop for stop in stops if stop)


def _logit_bias(body: SamplingBody | NativeSampling, vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise ApiError(
                f"logit_bias has the key {key[:40]!r}; keys are token ids from 0 to "
                f"{vocab_size - 1}.",
                code="invalid_value",
                param="logit_bias",
            )
        biases[int(key)] = bias
    return biases
