"""`generate` in SGLang's form: dictionaries in, dictionaries out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING, Any

from inkling_rocm.engine.handle import RequestHandle, amerged, merged
from inkling_rocm.engine.request import (
    DraftCounts,
    GenerationError,
    RequestError,
    SamplingParams,
    TokenLogprob,
    Update,
)
from inkling_rocm.engine.validate import token_ids

if TYPE_CHECKING:
    from inkling_rocm.engine.engine import Engine

# SGLang's spelling where it is not ours.
ALIASES = {"sampling_seed": "seed", "ebnf": "grammar"}
FIELDS = frozenset(field.name for field in fields(SamplingParams))


def sampling_params_from(given: Mapping[str, Any] | SamplingParams | None) -> SamplingParams:
    """SamplingParams of SGLang's dictionary.

    Raises: RequestError: an unknown name.
    """
    if given is None:
        return SamplingParams()
    if isinstance(given, SamplingParams):
        return given
    values = {ALIASES.get(name, name): value for name, value in given.items() if value is not None}
    unknown = sorted(set(values) - FIELDS)
    if unknown:
        raise RequestError(
            f"sampling parameter {unknown[0]!r} is not known; known: {', '.join(sorted(FIELDS))}",
            param=unknown[0],
        )
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    for name in ("stop", "stop_token_ids", "constraint_start_ids"):
        if name in values:
            if not isinstance(values[name], list | tuple | set | frozenset):
                raise RequestError(f"{name} {values[name]!r:.100}: wanted a list", param=name)
            values[name] = tuple(values[name])
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"])
    return SamplingParams(**values)


def _biases(given: Any) -> dict[int, float]:
    """logit_bias, whose tokens JSON has made strings."""
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias {given!r:.100}: wanted a dictionary", param="logit_bias")
    for token in given:
        if not isinstance(token, Integral | str) or isinstance(token, bool):
            raise RequestError(f"logit_bias {token!r:.100}: keys are token ids", param="logit_bias")
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise RequestError(
            f"logit_bias: {error}; keys are token ids", param="logit_bias"
        ) from error


def _speculation(drafts: DraftCounts, completion_tokens: int) -> dict[str, Any]:
    """What SGLang reports in meta_info; the rate has no bonus token in it, the length has."""
    meta: dict[str, Any] = {"spec_correct_drafts_histogram": list(drafts.histogram)}
    if drafts.proposed:
        meta |= {
            "spec_accept_rate": drafts.correct / drafts.proposed,
            "spec_accept_length": completion_tokens / drafts.verify_ct,
            "spec_num_correct_drafts": drafts.correct,
            "spec_num_proposed_drafts": drafts.proposed,
            "spec_verify_ct": drafts.verify_ct,
        }
    return meta


class _Output:
    """Everything one continuation has produced, as SGLang's dictionary."""

    def __init__(self, generation: Generation, handle: RequestHandle, index: int):
        self.generation = generation
        self.handle = handle
        self.index = index
        self.text: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.started = time.perf_counter()
        self.last: Update | None = None

    def add(self, update: Update) -> None:
        if update.finish_reason == "error":
            message = f"request {self.handle.rid} failed: {update.error}"
            raise GenerationError(message, code=update.error_code)
        self.text.append(update.text)
        self.ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        self.last = update

    def as_dict(self) -> dict[str, Any]:
        update, generation = self.last, self.generation
        assert update is not None
        meta: dict[str, Any] = {
            "id": self.handle.rid,
            "finish_reason": self._finish_reason(update),
            "prompt_tokens": update.prompt_tokens,
            "completion_tokens": update.completion_tokens,
            "cached_tokens": update.cached_tokens,
            "e2e_latency": time.perf_counter() - self.started,
        }
        if update.draft_counts is not None:
            meta |= _speculation(update.draft_counts, update.completion_tokens)
        if generation.return_logprob:
            start = generation.logprob_start_len
            prompt = self.prompt_logprobs[start:] if start >= 0 else []
            meta["input_token_logprobs"] = [self._triple(x) for x in prompt]
            meta["output_token_logprobs"] = [self._triple(x) for x in self.logprobs]
            if generation.top_logprobs_num:
                meta["input_top_logprobs"] = [self._top(x) for x in prompt]
                meta["output_top_logprobs"] = [self._top(x) for x in self.logprobs]
        return {"text": "".join(self.text), "output_ids": list(self.ids), "meta_info": meta}

    @staticmethod
    def _finish_reason(update: Update) -> dict[str, Any] | None:
        reason = update.finish_reason
        if reason is None:
            return None
        if reason == "stop":
            return {"type": "stop", "matched": update.matched_stop}
        if reason == "length":
            return {"type": "length", "length": update.completion_tokens}
        return {"type": reason, "message": update.error or "aborted"}

    def _text(self, token: int) -> str | None:
        text_of = self.generation.text_of
        return None if text_of is None else text_of([token])

    def _triple(self, entry: TokenLogprob) -> tuple[float | None, int, str | None]:
        return (entry.logprob, entry.token_id, self._text(entry.token_id))

    def _top(self, entry: TokenLogprob) -> list[tuple[float, int, str | None]] | None:
        if entry.logprob is None:
            return None
        return [(logprob, token, self._text(token)) for token, logprob in entry.top]


class Generation:
    """One call of `generate`: its requests, submitted; arguments as there."""

    def __init__(
        self,
        engine: Engine,
        prompt: str | list[str] | None,
        sampling_params: Any,
        input_ids: list[int] | list[list[int]] | None,
        *,
        return_logprob: bool,
        logprob_start_len: int,
        top_logprobs_num: int,
        stream: bool,
        rid: str | list[str] | None,
        return_text_in_logprobs: bool = False,
    ):
        tokenizer = engine.tokenizer if return_text_in_logprobs else None
        self.text_of = None if tokenizer is None else tokenizer.decode
        self.return_logprob = return_logprob
        self.logprob_start_len = logprob_start_len
        self.top_logprobs_num = top_logprobs_num
        prompts, self._is_list = _prompts(engine, prompt, input_ids)
        params = _for_each(sampling_params, len(prompts), "sampling_params")
        rids = _for_each(rid, len(prompts), "rid")
        self._outputs: list[list[_Output]] = []
        self._handles: list[RequestHandle] = []
        try:
            for ids, given, name in zip(prompts, params, rids, strict=True):
                parsed = sampling_params_from(given)
                handle = engine.submit(
                    ids,
                    parsed,
                    logprobs=top_logprobs_num if return_logprob else None,
                    prompt_logprobs=return_logprob and logprob_start_len >= 0,
                    rid=name,
                    stream=stream,
                )
                self._handles.append(handle)
                self._outputs.append([_Output(self, handle, i) for i in range(parsed.n)])
        except BaseException:
            self.abort()
            raise
        self._is_list |= any(len(outputs) > 1 for outputs in self._outputs)

    def result(self) -> dict | list[dict]:
        """Wait for everything."""
        try:
            for handle, outputs in zip(self._handles, self._outputs, strict=True):
                for update in handle:
                    outputs[update.index].add(update)
        except BaseException:
            self.abort()
            raise
        return self._collected()

    async def aresult(self) -> dict | list[dict]:
        """`result` for asyncio; cancelling it aborts the requests."""
        try:
            for handle, outputs in zip(self._handles, self._outputs, strict=True):
                async for update in handle:
                    outputs[update.index].add(update)
        except BaseException:
            self.abort()
            raise
        return self._collected()

    def iterate(self) -> Iterator[dict]:
        """Dictionaries with everything so far, as updates come; closing the iterator aborts."""
        try:
            for i, update in merged(self._handles):
                yield self._partial(i, update)
        finally:
            self.abort()

    async def aiterate(self) -> AsyncIterator[dict]:
        """`iterate` for asyncio."""
        try:
            async with aclosing(amerged(self._handles)) as updates:
                async for i, update in updates:
                    yield self._partial(i, update)
        finally:
            self.abort()

    def _partial(self, request: int, update: Update) -> dict:
        output = self._outputs[request][update.index]
        output.add(update)
        result = output.as_dict()
        if self._is_list:
            before = sum(len(outputs) for outputs in self._outputs[:request])
            result["index"] = before + update.index
        return result

    def _collected(self) -> dict | list[dict]:
        results = [output.as_dict() for outputs in self._outputs for output in outputs]
        return results if self._is_list else results[0]

    def abort(self) -> None:
        """Abort what has not ended; aborting the others is harmless."""
        for handle in self._handles:
            if not handle.ended:
                handle.abort()


def _prompts(engine: Engine, prompt: Any, input_ids: Any) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether the caller gave a list of them."""
    if (prompt is None) == (input_ids is None):
        raise RequestError("give exactly one of prompt and input_ids", param="prompt")
    if prompt is not None:
        if engine.tokenizer is None:
            raise RequestError(
                "prompt needs a tokenizer, and skip_tokenizer_init leaves none: give input_ids",
                param="prompt",
            )
        texts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise RequestError(f"prompt {prompt!r:.100}: wanted a text or a list", param="prompt")
        return [engine.tokenizer.encode(text) for text in texts], not isinstance(prompt, str)
    nested = isinstance(input_ids, list | tuple) and isinstance(
        next(iter(input_ids), 0), list | tuple
    )
    return [token_ids(ids, "input_ids") for ids in (input_ids if nested else [input_ids])], nested


def _for_each(value: Any, count: int, name: str) -> list:
    """A list argument as it is, anything else repeated."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name}: {len(value)} given for {count} prompts", param=name)
    return value
