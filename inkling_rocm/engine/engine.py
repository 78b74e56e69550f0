"""The engine's Python API; engine_thread.py is the background thread that does the work."""

from __future__ import annotations

import atexit
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from inkling_rocm.config import InklingConfig
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.build_core import build_core
from inkling_rocm.engine.constraint import ConstraintCompiler
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.engine.engine_thread import EngineThread
from inkling_rocm.engine.handle import RequestHandle
from inkling_rocm.engine.load import EngineParts, check_ranks, load_parts
from inkling_rocm.engine.metrics import EngineMetrics, EngineStats, NoMetrics
from inkling_rocm.engine.prefix_cache.open_tiers import check_storage
from inkling_rocm.engine.ranks import RankLost, Ranks
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.engine.sequence import Request
from inkling_rocm.engine.sequence import Sequence as Continuation
from inkling_rocm.engine.sglang_form import Generation
from inkling_rocm.engine.validate import check_request, integer, plain_params, token_ids

logger = logging.getLogger(__name__)


class Engine:
    """Serves one model from one background thread.

    Args:
        args: or the fields of EngineArgs as keyword arguments.
        metrics: receives observations from the engine's thread.
        parts: a model that is already there, instead of the one args would load.

    Raises: ValueError: the checkpoint or an argument is wrong, or the memory does not suffice.

    Attributes:
        context_length: most tokens of prompt and output together; less than the checkpoint's where
            the page pools hold less.
        stop_ids: the ids that end a turn.
    """

    def __init__(
        self,
        args: EngineArgs | None = None,
        *,
        metrics: EngineMetrics | None = None,
        parts: EngineParts | None = None,
        **kwargs: Any,
    ):
        if args is not None and kwargs:
            raise ValueError(f"give either args or keyword arguments, not both: {sorted(kwargs)}")
        self.args = args or EngineArgs(**kwargs)
        self._metrics = metrics or NoMetrics()
        self._ranks: Ranks | None = None
        self._thread = EngineThread(
            lambda: self._build(parts),
            self._end_ranks,
            max_queued=self.args.max_queued_requests,
            seed=self.args.random_seed,
            save=self.args.hicache_storage_backend is not None,
        )
        self._thread.start()
        atexit.register(self.shutdown)  # a thread inside torch must not outlive the interpreter

    @property
    def _core(self) -> EngineCore:
        return self._thread.core

    def _build(self, parts: EngineParts | None) -> tuple[EngineCore, torch.device]:
        """Everything up to the core. Runs in the engine's thread."""
        args = self.args
        check_storage(args)  # before what takes minutes
        if args.tp_size > 1:
            check_ranks(args)
            self._ranks = Ranks(args, self._rank_lost)
        parts = parts or load_parts(args)
        self.config: InklingConfig = parts.config
        self.tokenizer = parts.tokenizer
        self.model_name = args.served_model_name or args.model_path
        if args.meaningless:
            self.model_name += f" ({args.meaningless}: outputs are meaningless)"
            logger.warning("%s; use it for measuring only", self.model_name)
        self._vocabulary = parts.config.text.unpadded_vocab_size
        known = (*parts.config.eos_token_ids, *(self.tokenizer.eos_ids if self.tokenizer else ()))
        self.stop_ids = tuple(i for i in dict.fromkeys(known) if i < self._vocabulary)
        self._constraints = None
        if self.tokenizer is not None:
            self._constraints = ConstraintCompiler(self.tokenizer, self.stop_ids, self._vocabulary)
        core, plan = build_core(parts, args, self._metrics, self._ranks)
        self.context_length = plan.context_length
        return core, parts.device

    def _rank_lost(self, reason: str) -> None:
        """From the thread that watches the other ranks' processes."""

        def fail() -> None:
            if self._thread.failure is None:  # else a step has found it first
                raise RankLost(reason)

        self._thread.command(fail)

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        rid: str | None = None,
        stream: bool = True,
    ) -> RequestHandle:
        """Queue a request.

        Args:
            logprobs: alternatives to report with each generated token; None = no log
                probabilities. prompt_logprobs: report the prompt's too.
            rid: a name for it; drawn when None.
            stream: send updates token by token; otherwise one for each continuation at its end.

        Raises: RequestError: it can never run, or not now ("queue_full", "shutting_down").
        """
        prompt = token_ids(prompt_ids, "prompt_ids")
        params = plain_params(params)
        logprobs = None if logprobs is None else integer("logprobs", logprobs)
        check_request(
            prompt,
            params,
            logprobs=logprobs,
            context_length=self.context_length,
            vocabulary=self._vocabulary,
            has_tokenizer=self.tokenizer is not None,
        )
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self.stop_ids)
        rid = rid or uuid.uuid4().hex
        request = Request(
            rid=rid,
            prompt_ids=prompt,
            params=params,
            handle=self._handle(rid, params.n),
            stop_ids=frozenset(stop_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stream=stream,
            constraint=self._constraints.compile(params) if self._constraints else None,
        )
        return self._enqueue(request)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict | SamplingParams | list | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
        rid: str | list[str] | None = None,
    ) -> dict | list[dict] | Iterator[dict]:
        """Generate in SGLang's form.

        Args:
            prompt, input_ids: exactly one; a list of prompts makes a batch.
            sampling_params: one for all, or one a prompt.
            return_logprob: report log probabilities of the output and, from logprob_start_len on
                (-1 = none), of the prompt; top_logprobs_num: with this many alternatives.

        Returns: a dictionary (text, output_ids, meta_info); a list for a batch or n > 1; with
            stream an iterator of dictionaries with everything so far ("index" tells which).

        Raises: RequestError.
        """
        generation = Generation(
            self,
            prompt,
            sampling_params,
            input_ids,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            stream=stream,
            rid=rid,
        )
        return generation.iterate() if stream else generation.result()

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict | SamplingParams | list | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
        rid: str | list[str] | None = None,
    ) -> dict | list[dict] | AsyncIterator[dict]:
        """`generate` without blocking the event loop; with stream the result of awaiting it is an
        async iterator. Cancelling it aborts the requests."""
        generation = Generation(
            self,
            prompt,
            sampling_params,
            input_ids,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            stream=stream,
            rid=rid,
        )
        if stream:
            return generation.aiterate()
        return await generation.aresult()

    def prompt_logits(self, input_ids: Sequence[int]) -> Tensor:
        """Logits at every prompt token, computed like any prompt (chunks, pages, other requests
        beside it).

        Returns: fp32 [tokens, real vocabulary], on the CPU.
        Raises: RequestError: the prompt does not fit. RuntimeError: the forward failed.
        """
        prompt = token_ids(input_ids, "input_ids")
        params = SamplingParams(max_new_tokens=0)
        check_request(
            prompt,
            params,
            logprobs=None,
            context_length=self.context_length,
            vocabulary=self._vocabulary,
            has_tokenizer=True,
        )
        rid = uuid.uuid4().hex
        request = Request(
            rid=rid,
            prompt_ids=prompt,
            params=params,
            handle=self._handle(rid, 1),
            stop_ids=frozenset(),
            wants_logits=True,
            stream=False,
        )
        (last,) = self._enqueue(request)
        if last.finish_reason != "length":
            raise RuntimeError(f"prompt_logits ended by {last.finish_reason}: {last.error}")
        return torch.cat(request.prompt_logits)

    def abort(
        self, rid: str, index: int | None = None, reason: Literal["abort", "stop"] = "abort"
    ) -> None:
        """End a request, or only continuation `index` of its n, and free what it holds.

        Unknown rids are ignored: the request may just have ended.

        Args: reason: what its handle gets as finish_reason; "stop" where the caller has found the
            regular end of the output by itself.
        """
        self._thread.command(lambda: self._core.abort(rid, index, reason))

    @property
    def failure(self) -> str | None:
        """Why the engine's thread is gone; None while it runs."""
        return self._thread.failure

    def stats(self) -> EngineStats:
        """State of the engine, as of the last step."""
        return self._core.stats()

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the open ones.

        Args:    timeout: seconds; None = as long as it takes.
        Returns: whether all have ended; those that have not go on.
        """
        return self._thread.drain(timeout)

    def shutdown(self) -> None:
        """Abort what is open and end the thread. The engine cannot be used afterwards."""
        self._thread.shutdown()
        atexit.unregister(self.shutdown)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _enqueue(self, request: Request) -> RequestHandle:
        request.sequences = [
            Continuation(request, index, self.tokenizer) for index in range(request.params.n)
        ]
        self._thread.enqueue(request)
        return request.handle

    def _handle(self, rid: str, continuations: int) -> RequestHandle:
        return RequestHandle(rid, continuations, self.abort, self._thread.ended)
