"""The other ranks of a tensor-parallel engine: their processes, what is said to them, their end.

A follower ends when its pipe closes, so none outlives rank 0; when one ends early, its reason ends
the engine.
"""

from __future__ import annotations

import logging
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.build import build_executor, plan_engine
from inkling_rocm.engine.free_memory import free_bytes
from inkling_rocm.engine.gpu import make_sampler
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.local_executor import LocalExecutor
from inkling_rocm.engine.memory import MemoryPlan
from inkling_rocm.engine.shared_sampler import SharedSampler
from inkling_rocm.host.comm import connect

logger = logging.getLogger(__name__)

# Between a collective's failure and the news of the process that caused it.
REASON_SECONDS = 10.0
CLOSE_SECONDS = 10.0


class RankLost(ConnectionError):
    """A rank is gone or out of step: the engine cannot go on. Not a RuntimeError on purpose: those
    end one step's requests, this ends all."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """First message to a follower."""

    args: EngineArgs
    rank: int
    port: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A follower has loaded its shard; bytes still free on its device."""

    free: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Why a follower ends; `mistake`: the user's (a wrong argument or checkpoint)."""

    reason: str
    mistake: bool


class Ranks:
    """The followers of one engine.

    Args:   on_loss: called once, from another thread, with the reason when a follower ends early.
    Raises: RankLost: torch.distributed is already in use in this process; a follower ended before
        it could be told anything.

    Attributes:
        lost: why a follower ended; None while all run.
    """

    def __init__(self, args: EngineArgs, on_loss: Callable[[str], None]):
        if dist.is_initialized():
            raise RankLost(
                "torch.distributed is already initialised in this process; a tensor-parallel "
                "engine needs it for itself"
            )
        self.lost: str | None = None
        self._args = args
        self._on_loss = on_loss
        self._news = threading.Event()
        self._closing = False
        self._leaving = threading.Lock()
        self._local: LocalExecutor | None = None
        self._port = _free_port()
        self._processes: list[subprocess.Popen] = []
        for rank in range(1, args.tp_size):
            command = [sys.executable, "-m", "inkling_rocm.engine.follower"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._processes.append(process)
            try:
                _send(process, Start(args=args, rank=rank, port=self._port))
            except OSError as error:
                reason = self._reason(rank, process, None)
                self.close()
                raise RankLost(reason) from error

    def join(self, parts: EngineParts) -> tuple[MemoryPlan, LocalExecutor]:
        """Wait for the followers' shards, agree on the memory, connect.

        Raises: ValueError: a follower was given something wrong. RankLost: one has ended.
        """
        args, device = self._args, parts.device
        free = [free_bytes(device)]
        for rank, process in enumerate(self._processes, 1):
            report = _receive(process)
            if not isinstance(report, Ready):
                reason = self._reason(rank, process, report)
                if isinstance(report, Failed) and report.mistake:
                    raise ValueError(reason)
                raise RankLost(reason)
            free.append(report.free)
        # Ranks on CPUs share one machine's memory.
        share = min(free) // (args.tp_size if device.type == "cpu" else 1)
        plan = plan_engine(parts, args, free=share)
        self.send(plan)
        for rank, process in enumerate(self._processes, 1):
            watch = threading.Thread(
                target=self._watch, args=(rank, process), name=f"inkling-rank-{rank}", daemon=True
            )
            watch.start()
        try:
            comm = connect(0, args.tp_size, self._port, device, args.dist_timeout)
            sampler = SharedSampler(make_sampler(parts, plan), comm)
            self._local = build_executor(parts, args, plan, comm, sampler)
            return plan, self._local
        except Exception as error:
            raise self.failure(error) from error

    def send(self, message: Any) -> None:
        """To every follower. Raises: RankLost: one has ended."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for process in self._processes:
            try:
                _write(process, data)
            except OSError as error:
                raise self.failure(error) from error

    def failure(self, error: BaseException) -> RankLost:
        """The exception that says why a step cannot be finished: a lost follower, else `error`."""
        if isinstance(error, RankLost):
            return error
        connection = isinstance(error, (OSError, dist.DistError)) or "gloo" in str(error)
        if connection:
            self._news.wait(REASON_SECONDS)
        if self.lost is not None:
            return RankLost(self.lost)
        return RankLost(f"a step failed on rank 0, {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the followers and the group."""
        if self._local is not None:
            self._within(CLOSE_SECONDS, self._end_steps, "started steps did not end")
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:  # what was still buffered for a process that has ended
                logger.debug("rank process %d had ended", process.pid)
        for process in self._processes:
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # Where an engine fails while it captures graphs, the failure's frames hold some, and NCCL
        # waits for those.
        self._within(CLOSE_SECONDS, self._leave, "the group of the ranks could not be left")

    @staticmethod
    def _within(seconds: float, action: Callable[[], None], otherwise: str) -> None:
        """Wait for something that may never end, and warn."""
        thread = threading.Thread(target=action, name="inkling-ranks-end", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            logger.warning("%s in %g s", otherwise, seconds)

    def _end_steps(self) -> None:
        """Wait for what was started: by now all ranks are there, or its collectives are aborted."""
        assert self._local is not None
        try:
            self._local.finish()
            self._local.release()
        except RuntimeError as error:  # the device has failed, and the step has said so
            logger.debug("the device cannot be waited for: %s", error)

    def _leave(self) -> None:
        """Leave the group. From NCCL's by aborting: that ends kernels that wait for a rank which is
        gone, and does not ask the others."""
        with self._leaving:
            if not dist.is_initialized():
                return
            if dist.get_backend() == "nccl":
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    def _watch(self, rank: int, process: subprocess.Popen) -> None:
        """Wait for a follower's last words or its end."""
        report = _receive(process)
        if self._closing:
            return
        reason = self._reason(rank, process, report)
        if self.lost is None:
            self.lost = reason
            logger.error("%s", reason)
        self._news.set()
        self._on_loss(reason)
        if dist.is_initialized() and dist.get_backend() == "nccl":
            # A kernel that waits for the lost rank never ends by itself. This returns when `close`
            # has destroyed the graphs.
            self._leave()

    def _reason(self, rank: int, process: subprocess.Popen, report: Any) -> str:
        if isinstance(report, Failed):
            return f"tensor-parallel rank {rank}: {report.reason}"
        try:
            code: int | str = process.wait(REASON_SECONDS)
        except subprocess.TimeoutExpired:
            code = "unknown"
        return (
            f"tensor-parallel rank {rank} (process {process.pid}) ended with exit code {code}; "
            "its log is on this process's standard error"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _send(process: subprocess.Popen, message: Any) -> None:
    _write(process, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _write(process: subprocess.Popen, data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()


def _receive(process: subprocess.Popen) -> Any:
    """The next message; None when the process has closed its end."""
    assert process.stdout is not None
    try:
        return pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        return None
