"""An engine double that plays given token ids: deterministic input for parsers and streams."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.detokenizer import Detokenizer
from inkling_rocm.engine.metrics import EngineStats
from inkling_rocm.engine.request import (
    ErrorCode,
    RequestError,
    SamplingParams,
    TokenLogprob,
    Update,
)
from inkling_rocm.engine.tokenizer import InklingTokenizer

TOKENIZER = InklingTokenizer()
_SPECIAL = re.compile(r"<([a-z_]+)>")


def encode(text: str) -> list[int]:
    """Ids of text in which <name> stands for a special token."""
    ids: list[int] = []
    at = 0
    for match in _SPECIAL.finditer(text):
        if match.group(1) in TOKENIZER.special_ids:
            ids += TOKENIZER.encode(text[at : match.start()])
            ids.append(TOKENIZER.special_ids[match.group(1)])
            at = match.end()
    return ids + TOKENIZER.encode(text[at:])


class ScriptedHandle:
    """Plays one list of ids per continuation, `chunk` ids an update, round robin."""

    def __init__(self, engine: ScriptedEngine, rid: str, prompt: list[int], params, logprobs):
        self.rid = rid
        self.aborted = False
        self._stopped: set[int] = set()
        self._engine = engine
        self._prompt = prompt
        self._logprobs = logprobs
        scripts = engine.script(prompt, params)
        self._left = [
            (list(scripts[i % len(scripts)])[: params.max_new_tokens]) for i in range(params.n)
        ]
        self._length = [
            len(scripts[i % len(scripts)]) > params.max_new_tokens for i in range(params.n)
        ]
        self._text = [
            Detokenizer(TOKENIZER, skip_special_tokens=params.skip_special_tokens)
            for _ in range(params.n)
        ]
        self._made = [0] * params.n
        self._ended = False
        self._updates = self._play()

    def abort(self, index: int | None = None, reason: str = "abort") -> None:
        if index is None:
            self.aborted = True
            self._engine.aborted.append(self.rid)
        else:
            self._stopped.add(index)
            self._engine.stopped.append((index, reason))

    @property
    def ended(self) -> bool:
        return self._ended

    def __aiter__(self):
        return self

    async def __anext__(self) -> Update:
        return await anext(self._updates)

    async def _play(self):
        running = list(range(len(self._left)))
        self._engine.running += 1
        try:
            while running:
                for index in list(running):
                    await asyncio.sleep(self._engine.delay)
                    if index in self._stopped:
                        running.remove(index)
                        continue
                    update = self._next(index)
                    if update.finish_reason is not None:
                        running.remove(index)
                    yield update
        finally:
            self._engine.running -= 1
            self._ended = True

    def _next(self, index: int) -> Update:
        ids = self._left[index][: self._engine.chunk]
        self._left[index] = self._left[index][self._engine.chunk :]
        self._made[index] += len(ids)
        last = not self._left[index]
        text = "".join(map(self._text[index].add, ids)) + (
            self._text[index].finish() if last else ""
        )
        reason = None
        if last:
            reason = "length" if self._length[index] else self._engine.finish
        entries = ()
        if self._logprobs is not None:
            top = tuple((i, -1.0 - i) for i in range(self._logprobs))
            entries = tuple(TokenLogprob(token_id=i, logprob=-0.5, top=top) for i in ids)
        return Update(
            index=index,
            token_ids=tuple(ids),
            text=text,
            logprobs=entries,
            finish_reason=reason,
            error="planted" if reason == "error" else None,
            error_code=self._engine.error_code if reason == "error" else None,
            prompt_tokens=len(self._prompt),
            completion_tokens=self._made[index],
            cached_tokens=self._engine.cached,
        )


class ScriptedEngine:
    """What the server needs of an engine.

    Args:
        script: (prompt ids, params) -> the ids each continuation generates.
    """

    args = EngineArgs(model_path="scripted")
    model_name = "scripted"
    context_length = 4096
    failure: str | None = None
    config = SimpleNamespace(text=SimpleNamespace(unpadded_vocab_size=200058))
    tokenizer = TOKENIZER

    def __init__(self, script: Callable[[list[int], SamplingParams], Sequence[Sequence[int]]]):
        self.script = script
        self.chunk = 1
        self.delay = 0.0
        self.finish = "stop"
        self.error_code: ErrorCode = "step_failed"
        self.cached = 0
        self.running = 0
        self.aborted: list[str] = []
        self.stopped: list[tuple[int, str]] = []
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.refusal: RequestError | None = None

    def submit(
        self, prompt_ids, params, *, logprobs=None, prompt_logprobs=False, rid=None, stream=True
    ):
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append((list(prompt_ids), params))
        return ScriptedHandle(self, rid or "r", list(prompt_ids), params, logprobs)

    def stats(self) -> EngineStats:
        return EngineStats(
            queued=0,
            running=self.running,
            pages_used={"global": 0, "window": 0},
            pages_total={"global": 10, "window": 5},
            conv_slots_used=0,
            conv_slots_total=4,
            prompt_tokens=0,
            generated_tokens=0,
            preemptions=0,
            requests_finished=0,
        )


def saying(text: str) -> ScriptedEngine:
    """An engine that always generates this text (special tokens as <name>)."""
    ids = encode(text)
    return ScriptedEngine(lambda _prompt, _params: [ids])
