"""A serving benchmark over several concurrencies: prints, rows, plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inkling_rocm.bench.clients import Client
from inkling_rocm.bench.plot import plot_serving
from inkling_rocm.bench.rows import append_rows
from inkling_rocm.bench.serving import send
from inkling_rocm.bench.workload import Task, random_tasks, summary

LEAST_PROMPTS = 8
SHOWN = (
    "completed", "failed", "duration_s", "request_throughput", "input_throughput",
    "output_throughput", "total_throughput_per_gpu", "interactivity_tokens_per_s_user",
    "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p95_itl_ms", "p99_itl_ms",
    "median_e2e_latency_ms",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is sent, see workload.random_tasks; `facts` go into every row.

    Attributes: num_prompts: at most. prompts_per_concurrency: of each place, LEAST_PROMPTS at
        least; None = num_prompts whatever the concurrency.
    """

    backend: str
    model: str
    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float
    request_rate: float
    vocabulary: int
    seed: int
    warmup_requests: int
    gpus: int
    facts: Mapping[str, Any]
    prompts_per_concurrency: int | None = None

    def run(
        self,
        client: Client,
        concurrencies: Sequence[int],
        *,
        output_file: Path | None,
        plot: Path | None,
    ) -> list[dict[str, Any]]:
        """One row for each concurrency, with prompts of its own: a prefix cache that has seen those
        of the one before would answer for the model. Raises: ValueError: no request succeeded."""
        if self.warmup_requests:
            warm = self._tasks(self.seed - 1, self.warmup_requests)
            send(client, warm, max_concurrency=max(concurrencies), progress=False)
        rows = []
        for seed, concurrency in enumerate(concurrencies, self.seed):
            tasks = self._tasks(seed, self._prompts(concurrency))
            outcomes, seconds = send(client, tasks, max_concurrency=concurrency)
            row = {
                "op": "serving",
                **{name: value for name, value in asdict(self).items() if name != "facts"},
                "seed": seed,
                "num_prompts": len(tasks),
                "request_rate": str(self.request_rate),  # JSON has no infinity
                "max_concurrency": concurrency,
                **summary(outcomes, seconds, self.gpus),
                **self.facts,
            }
            rows.append(row)
            print(f"\nconcurrency {concurrency}, {self.backend}, {self.model}")
            for name in SHOWN:
                print(f"  {name:<34} {row[name]}")
            if row["failed"]:
                first = next(outcome.error for outcome in outcomes if outcome.error)
                print(f"  first failure: {first}")
            if output_file is not None:
                append_rows(output_file, [row])
        if plot is not None:
            plot_serving(rows, plot)
        return rows

    def _prompts(self, concurrency: int) -> int:
        if self.prompts_per_concurrency is None:
            return self.num_prompts
        wanted = self.prompts_per_concurrency * concurrency
        return min(max(wanted, LEAST_PROMPTS), self.num_prompts)

    def _tasks(self, seed: int, count: int) -> list[Task]:
        return random_tasks(
            num_prompts=count,
            input_len=self.input_len,
            output_len=self.output_len,
            range_ratio=self.range_ratio,
            request_rate=self.request_rate,
            vocabulary=self.vocabulary,
            seed=seed,
        )
