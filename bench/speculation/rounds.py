"""Rounds of a running engine: how long they take, what they accept, where the host waits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from inkling_rocm.engine import Engine, EngineStats, NoMetrics, SamplingParams

# Runtime calls in which the host waits for all that a stream or device was given, CUDA's and HIP's.
BLOCKING = tuple(
    prefix + name
    for prefix in ("cuda", "hip")
    for name in ("DeviceSynchronize", "StreamSynchronize", "Memcpy", "Memset", "MemcpyWithStream")
)
# In which it waits for one point of a stream: how results of an earlier round are read.
WAITING = ("cudaEventSynchronize", "hipEventSynchronize")
MARK = "inkling speculation round"


@dataclass
class Window:
    """Consecutive rounds of one batch size.

    Attributes:
        ends: when each was booked, seconds; the first only starts the clock.
        drafted, accepted: of all rounds but the first.
        calls: runtime calls between the first and the last, by name; None = not profiled.
    """

    ends: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    calls: Counter[str] | None = None

    @property
    def rounds(self) -> int:
        return len(self.ends) - 1

    @property
    def round_s(self) -> list[float]:
        """Of each round."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.ends[-1] - self.ends[0])

    @property
    def acceptance(self) -> float:
        """Share of drafts accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


def runtime_calls(events: Sequence[tuple[str, int]]) -> Counter[str]:
    """Calls of the runtime between the first and the last mark, by name.

    Args:   events: (name, start); those with the name MARK are the ends of rounds.
    """
    marks = [start for name, start in events if name == MARK]
    first, last = min(marks), max(marks)
    return Counter(
        name for name, start in events if name.startswith(("cuda", "hip")) and first < start < last
    )


class RoundWatch(NoMetrics):
    """Observes an engine; its methods but `begin` and `window` run in the engine's thread.

    Args:   plain: without speculation each step counts as a round.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self._plain = plain
        self.done = threading.Event()
        self._window = Window()
        self._batch = self._skip = self._wanted = 0
        self._profile: profile | None = None

    def begin(self, batch: int, *, skip: int, rounds: int, profiled: bool) -> None:
        """Watch `rounds` rounds of `batch` rows after the first `skip` of them."""
        self._window = Window()
        self._batch, self._skip, self._wanted = batch, skip, rounds
        self._profile = None
        if profiled:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
        self.done.clear()

    def step(self, stats: EngineStats, *, tokens: int, seconds: float) -> None:
        if self._plain:
            self._round([0] * tokens, [0] * tokens)

    def speculation_round(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        steps: int,
        seconds: float | None,
    ) -> None:
        self._round(drafted, accepted)

    def _round(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        now = time.perf_counter()
        if self.done.is_set() or len(drafted) != self._batch:
            return
        if self._skip:
            self._skip -= 1
            return
        window, prof = self._window, self._profile
        if prof is not None:
            if not window.ends:
                prof.start()
            with record_function(MARK):
                pass
        if window.ends:
            window.drafted += sum(drafted)
            window.accepted += sum(accepted)
            window.tokens += sum(accepted) + len(accepted)
        window.ends.append(now)
        if window.rounds == self._wanted:
            if prof is not None:
                prof.stop()
                # Not prof.events(), which takes seconds to build its tree.
                found = prof.profiler.kineto_results.events()
                window.calls = runtime_calls([(event.name(), event.start_ns()) for event in found])
            self.done.set()

    def window(self) -> Window:
        """What was watched last."""
        return self._window


def most_tokens(rounds: int, batch: int, steps: int) -> int:
    """Tokens a request may need until all of its batch have had `rounds` rounds together: while the
    last prompts are computed the first requests decode already."""
    return (rounds + 2 * batch + 16) * (steps + 1)


def run_rounds(
    engine: Engine,
    watch: RoundWatch,
    *,
    batch: int,
    prompt_len: int,
    steps: int,
    skip: int,
    rounds: int,
    profiled: bool = False,
) -> Window:
    """Decode `batch` greedy requests for as many rounds as are wanted, then abort them.

    Raises: RuntimeError: they ended before.
    """
    watch.begin(batch, skip=skip, rounds=rounds, profiled=profiled)
    most = most_tokens(skip + rounds, batch, steps)
    params = SamplingParams(max_new_tokens=most, temperature=0.0, ignore_eos=True)
    handles = [
        engine.submit(prompt(row, prompt_len, engine), params, stream=False) for row in range(batch)
    ]
    while not watch.done.wait(0.05):
        if any(handle.ended for handle in handles) and not watch.done.is_set():
            reasons = {update.error or update.finish_reason for h in handles for update in h}
            raise RuntimeError(
                f"a request of batch {batch} ended ({reasons}) before {skip} + {rounds} rounds had "
                "run; shorten the prompt or the number of rounds"
            )
    for handle in handles:
        handle.abort()
    for handle in handles:
        list(handle)
    return watch.window()


def prompt(row: int, length: int, engine: Engine) -> list[int]:
    """Token ids that differ from row to row."""
    vocabulary = engine.config.text.unpadded_vocab_size
    return [(7 * i + 31 * row) % min(vocabulary - 10, 5000) + 5 for i in range(length)]
