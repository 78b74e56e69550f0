"""The engine: a background thread around EngineCore, and the Python API."""

from __future__ import annotations

import atexit
import logging
import random
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from inkling_rocm.config import InklingConfig
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.buckets import decode_buckets
from inkling_rocm.engine.build import build_executor, plan_engine
from inkling_rocm.engine.collection import short_collections
from inkling_rocm.engine.constraint import ConstraintCompiler
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.engine.executor import Executor
from inkling_rocm.engine.handle import RequestHandle
from inkling_rocm.engine.load import EngineParts, check_ranks, load_parts
from inkling_rocm.engine.metrics import EngineMetrics, EngineStats, NoMetrics
from inkling_rocm.engine.prefix_cache.open_tiers import check_storage, open_tiers
from inkling_rocm.engine.ranks import RankLost, Ranks
from inkling_rocm.engine.request import RequestError, SamplingParams
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.sequence import Request
from inkling_rocm.engine.sequence import Sequence as Continuation
from inkling_rocm.engine.sglang_form import Generation
from inkling_rocm.engine.speculative.adaptive import AdaptiveSteps
from inkling_rocm.engine.speculative.stats import SpeculationStats
from inkling_rocm.engine.tensor_parallel import TensorParallelExecutor
from inkling_rocm.engine.validate import check_request
from inkling_rocm.host import SingleRank
from inkling_rocm.host.comm import RankSlice

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
        self._seeds = random.Random(self.args.random_seed)
        self._arrivals = 0
        self._open: set[str] = set()  # rids that were submitted and have not ended
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = self._draining = False
        self._failure: str | None = None
        self._ranks: Ranks | None = None
        built: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(parts, built), name="inkling-engine", daemon=True
        )
        self._thread.start()
        built.result()
        atexit.register(self.shutdown)  # a thread inside torch must not outlive the interpreter

    def _run(self, parts: EngineParts | None, built: Future[None]) -> None:
        """The engine's thread. Loading is done here too: OpenMP keeps a team of threads for every
        thread that ran a parallel region, and a second team makes each region of a small model
        several times slower (the teams outnumber the cores, so they sleep instead of spin)."""
        try:
            check_storage(self.args)  # before what takes minutes
            if self.args.tp_size > 1:
                check_ranks(self.args)
                self._ranks = Ranks(self.args, self._rank_lost)
            self._build(parts or load_parts(self.args))
        except BaseException as error:
            self._end_ranks()
            built.set_exception(error)
            return
        built.set_result(None)
        try:
            with short_collections(self._device):
                self._loop()
        finally:
            self._core.scheduler.cache.close()
            self._end_ranks()

    def _rank_lost(self, reason: str) -> None:
        """From the thread that watches the other ranks' processes."""

        def fail() -> None:
            if self._failure is None:  # else a step has found it first
                raise RankLost(reason)

        self._command(fail)

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def _build(self, parts: EngineParts) -> None:
        args, text = self.args, parts.config.text
        self._device = parts.device
        self.config: InklingConfig = parts.config
        self.tokenizer = parts.tokenizer
        self.model_name = args.served_model_name or args.model_path
        if args.meaningless:
            self.model_name += f" ({args.meaningless}: outputs are meaningless)"
            logger.warning("%s; use it for measuring only", self.model_name)
        self._vocabulary = text.unpadded_vocab_size
        if self._ranks is None:
            plan = plan_engine(parts, args)
            comm = SingleRank() if args.rank_slice is None else RankSlice(args.rank_slice)
            local = build_executor(parts, args, plan, comm)
            executor: Executor = local
        else:
            plan, local = self._ranks.join(parts)
            executor = TensorParallelExecutor(local, self._ranks)
        self.context_length = plan.context_length
        scheduler = Scheduler(
            local.host.pools,
            local.host.rings,
            chunk_tokens=plan.chunk_tokens,
            max_running=plan.max_running,
            depths=plan.draft_depths,
            most_drafts=plan.most_drafts,
        )
        open_tiers(scheduler.cache, parts, args)
        speculation = None
        if plan.most_drafts:
            adaptive = None
            if args.speculative_adaptive:
                buckets = decode_buckets(plan.max_running)
                adaptive = AdaptiveSteps(plan.most_drafts, buckets=buckets)
            speculation = SpeculationStats(plan.most_drafts, self._metrics, adaptive)
        self._core = EngineCore(executor, scheduler, self._metrics, speculation)
        known = (*parts.config.eos_token_ids, *(self.tokenizer.eos_ids if self.tokenizer else ()))
        self.stop_ids = tuple(i for i in dict.fromkeys(known) if i < self._vocabulary)
        self._constraints = None
        if self.tokenizer is not None:
            self._constraints = ConstraintCompiler(self.tokenizer, self.stop_ids, self._vocabulary)
        self._most_requests = plan.max_running + args.max_queued_requests

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
        prompt = [int(token) for token in prompt_ids]
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
        prompt = [int(token) for token in input_ids]
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

    def abort(self, rid: str, index: int | None = None) -> None:
        """End a request, or only continuation `index` of its n, and free what it holds; its handle
        gets finish_reason "abort". Unknown rids are ignored: the request may just have ended."""
        self._command(lambda: self._core.abort(rid, index))

    @property
    def failure(self) -> str | None:
        """Why the engine's thread is gone; None while it runs."""
        return self._failure

    def stats(self) -> EngineStats:
        """State of the engine, as of the last step."""
        return self._core.stats()

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the open ones.

        Args:    timeout: seconds; None = as long as it takes.
        Returns: whether all have ended; those that have not go on.
        """
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._open, timeout)

    def shutdown(self) -> None:
        """Abort what is open and end the thread. The engine cannot be used afterwards."""
        with self._changed:
            self._closing = self._draining = True
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.shutdown)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _enqueue(self, request: Request) -> RequestHandle:
        params = request.params
        request.sequences = [
            Continuation(request, index, self.tokenizer) for index in range(params.n)
        ]
        with self._changed:
            if self._failure is not None:
                raise RequestError(self._failure, code="engine_failed")
            if self._draining:
                raise RequestError("the engine is shutting down", code="shutting_down")
            if len(self._open) >= self._most_requests:
                raise RequestError(
                    f"{len(self._open)} requests are open, the most there may be "
                    "(max_running_requests + max_queued_requests); try again later",
                    code="queue_full",
                )
            if request.rid in self._open:
                raise RequestError(f"rid {request.rid!r} is in use", param="rid")
            self._open.add(request.rid)
            self._arrivals += 1
            request.order = self._arrivals
            request.seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
            # In one critical section with the checks: a request that passed them is in the inbox
            # before shutdown can close it, so its handle always ends.
            self._command(lambda: self._core.add(request))
        return request.handle

    def _handle(self, rid: str, continuations: int) -> RequestHandle:
        return RequestHandle(rid, continuations, self.abort, self._closed)

    def _closed(self, rid: str) -> None:
        with self._changed:
            self._open.discard(rid)
            self._changed.notify_all()

    def _command(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(command)
            self._changed.notify_all()

    def _loop(self) -> None:
        core = self._core
        commands: list[Callable[[], None]] = []
        try:
            while True:
                with self._changed:
                    if core.idle and not self._inbox:
                        core.metrics.step(core.stats(), tokens=0, seconds=0.0)
                    while core.idle and not self._inbox and not self._closing:
                        self._changed.wait()
                    commands = list(self._inbox)
                    self._inbox.clear()
                    closing = self._closing
                while commands:
                    commands.pop(0)()
                if closing:
                    core.abort_all()
                    if self.args.hicache_storage_backend is not None:
                        core.scheduler.cache.save()
                    return
                if not core.idle:
                    core.step()
        except BaseException as error:
            # Nothing may hang on an engine that is gone; the fault itself goes on its way.
            with self._changed:
                self._failure = f"the engine stopped: {type(error).__name__}: {error}"
                commands += self._inbox
            for command in commands:
                command()
            core.fail_all(self._failure)
            raise
