"""Requests to send and what came of them, with the words and formulas of SGLang's bench_serving."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Task:
    """One request: prompt ids, tokens to generate, seconds after the start when it arrives."""

    prompt_ids: list[int]
    output_len: int
    arrival: float


@dataclass(kw_only=True)
class Outcome:
    """One answer. Times are seconds on one clock; token_times has one entry a token (tokens that
    came in one message share a time)."""

    prompt_len: int
    sent: float
    token_times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def latency(self) -> float:
        return self.token_times[-1] - self.sent

    @property
    def itl(self) -> list[float]:
        """Gaps between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def random_tasks(
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    request_rate: float,
    vocabulary: int,
    seed: int,
) -> list[Task]:
    """Prompts of random ids.

    Args:   range_ratio: lengths are uniform in [ratio * length, length]. request_rate: arrivals a
            second, as a Poisson process; inf = all at once.
    Raises: ValueError: a length below 1 or a ratio outside 0..1.
    """
    if min(num_prompts, input_len, output_len) < 1 or not 0 <= range_ratio <= 1:
        raise ValueError(
            f"num_prompts {num_prompts}, input length {input_len}, output length {output_len}: "
            f"wanted at least 1; range ratio {range_ratio}: wanted 0 to 1"
        )
    if not request_rate > 0:
        raise ValueError(f"request rate {request_rate}: wanted more than 0, or inf")
    draw = random.Random(seed)

    def length(most: int) -> int:
        return draw.randint(max(int(most * range_ratio), 1), most)

    tasks, arrival = [], 0.0
    for _ in range(num_prompts):
        prompt = [draw.randrange(vocabulary) for _ in range(length(input_len))]
        tasks.append(Task(prompt_ids=prompt, output_len=length(output_len), arrival=arrival))
        if request_rate != float("inf"):
            arrival += draw.expovariate(request_rate)
    return tasks


def summary(outcomes: Sequence[Outcome], seconds: float, gpus: int = 1) -> dict[str, Any]:
    """The metrics of a run.

    Raises: ValueError: no request succeeded; says why the first failed.
    """
    done = [outcome for outcome in outcomes if outcome.error is None and outcome.token_times]
    if not done:
        reason = outcomes[0].error if outcomes else "none was sent"
        raise ValueError(f"no request succeeded: {reason}")
    inputs = sum(outcome.prompt_len for outcome in done)
    outputs = sum(len(outcome.token_times) for outcome in done)
    gaps = [gap for outcome in done for gap in outcome.itl]
    tpot = [(o.latency - o.ttft) / (len(o.token_times) - 1) for o in done if len(o.token_times) > 1]
    return {
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "duration_s": round(seconds, 4),
        "request_throughput": round(len(done) / seconds, 4),
        "input_throughput": round(inputs / seconds, 2),
        "output_throughput": round(outputs / seconds, 2),
        "total_throughput_per_gpu": round((inputs + outputs) / seconds / gpus, 2),
        # Figure 7's horizontal axis: decode speed that one user sees.
        "interactivity_tokens_per_s_user": round(1 / statistics.mean(tpot), 2) if tpot else None,
        **_percentiles("ttft_ms", [o.ttft for o in done]),
        **_percentiles("tpot_ms", tpot),
        **_percentiles("itl_ms", gaps),
        **_percentiles("e2e_latency_ms", [o.latency for o in done]),
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return {f"{kind}_{name}": None for kind in ("mean", "median", "p95", "p99")}
    values = np.array(seconds) * 1e3
    return {
        f"mean_{name}": round(float(values.mean()), 3),
        **{
            f"{kind}_{name}": round(float(np.percentile(values, q)), 3)
            for kind, q in (("median", 50), ("p95", 95), ("p99", 99))
        },
    }
