"""What the server needs from an engine; `inkling_rocm.engine.Engine` fits, and so do test doubles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from inkling_rocm.engine.metrics import EngineStats
from inkling_rocm.engine.request import SamplingParams, Update
from inkling_rocm.engine.tokenizer import Tokenizer


class Handle(Protocol):
    """One running request."""

    @property
    def rid(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Update]: ...

    def abort(self) -> None: ...


class Backend(Protocol):
    """The engine as the server sees it.

    Attributes:
        model_name: name under which the model is listed.
        context_length: most tokens of one sequence, prompt and output together.
        vocab_size: real vocabulary rows (the padding rows are not tokens).
    """

    @property
    def model_name(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        rid: str | None = None,
    ) -> Handle: ...

    def stats(self) -> EngineStats: ...
