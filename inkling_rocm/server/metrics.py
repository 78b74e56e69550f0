"""Prometheus metrics: engine observations as histograms and counters, its state as gauges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inkling_rocm.engine import Engine
from inkling_rocm.engine.metrics import EngineStats, SpeculationSnapshot
from inkling_rocm.engine.prefix_cache import CacheStats
from inkling_rocm.engine.prefix_cache.stats import TiersStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class PrometheusMetrics:
    """An `EngineMetrics` with its own registry, so that several engines can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = Histogram(
            "inkling_time_to_first_token_seconds",
            "From submission to the first token of a continuation.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            "inkling_inter_token_latency_seconds",
            "Between two tokens of a continuation.",
            buckets=_INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._duration = Histogram(
            "inkling_e2e_request_latency_seconds",
            "From submission to the end of a continuation.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._step_seconds = Histogram(
            "inkling_step_seconds",
            "One forward of the engine.",
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self._round_seconds = Histogram(
            "inkling_spec_round_seconds",
            "One round of speculation, drafts and verification.",
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self._finished = Counter(
            "inkling_requests_finished",
            "Continuations that ended, by reason.",
            ["reason"],
            registry=self.registry,
        )

    def step(self, stats: EngineStats, *, tokens: int, seconds: float) -> None:
        if tokens:
            self._step_seconds.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def speculation_round(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        steps: int,
        seconds: float | None,
    ) -> None:
        if seconds is not None:
            self._round_seconds.observe(seconds)

    def finished(
        self, reason: str, *, prompt_tokens: int, completion_tokens: int, seconds: float
    ) -> None:
        self._finished.labels(reason).inc()
        self._duration.observe(seconds)


class EngineGauges:
    """Collector that reads the engine's state when it is scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats: EngineStats = self._engine.stats()
        gauges = {
            "inkling_queue_requests": ("Continuations waiting to run.", stats.queued),
            "inkling_running_requests": ("Continuations in the batch.", stats.running),
            "inkling_conv_slots_used": ("Short-convolution slots in use.", stats.conv_slots_used),
            "inkling_conv_slots": ("Short-convolution slots.", stats.conv_slots_total),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        counters = {
            "inkling_prompt_tokens": (
                "Prompt tokens computed, recomputed ones too; rate() is tokens/s.",
                stats.prompt_tokens,
            ),
            "inkling_generation_tokens": (
                "Tokens sampled; rate() is tokens/s.",
                stats.generated_tokens,
            ),
            "inkling_preemptions": ("Preemptions.", stats.preemptions),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        yield _by_pool("inkling_pages_used", "K/V pages in use, by pool.", stats.pages_used)
        yield _by_pool("inkling_pages", "K/V pages, by pool.", stats.pages_total)
        if stats.speculation is not None:
            yield from _speculation(stats.speculation)
        if stats.prefix_cache is not None:
            yield from _prefix_cache(stats.prefix_cache)


def _prefix_cache(stats: CacheStats) -> Iterator[Metric]:
    gauges = {
        "inkling_prefix_cache_boundaries": (
            "Positions at which a kept prefix can be continued.",
            stats.boundaries,
        ),
        "inkling_prefix_cache_snapshots": (
            "Positions that can be kept at most.",
            stats.snapshots,
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(name, text, value=value)
    counters = {
        "inkling_prefix_cache_lookups": ("Sequences that began or resumed.", stats.lookups),
        "inkling_prefix_cache_hits": ("Those that found a prefix.", stats.hits),
        "inkling_cached_tokens": (
            "Tokens that were not computed because their prefix was kept.",
            stats.hit_tokens,
        ),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(name, text, value=value)
    yield _by_pool(
        "inkling_prefix_cache_pages",
        "K/V pages the prefix cache refers to, by pool; sequences may use them too.",
        stats.pages,
    )
    evictions = CounterMetricFamily(
        "inkling_prefix_cache_evictions",
        "Positions given up, by what was short: snapshots, or pages of a pool.",
        labels=["short"],
    )
    for short, count in stats.evictions.items():
        evictions.add_metric([short], count)
    yield evictions
    if stats.tiers is not None:
        yield from _tiers(stats.tiers)


def _tiers(stats: TiersStats) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "inkling_prefix_cache_loads", "Prefixes brought back from the tiers.", value=stats.loads
    )
    yield CounterMetricFamily(
        "inkling_prefix_cache_failed_loads",
        "Prefixes of which a part was lost after all.",
        value=stats.failed_loads,
    )
    tiers = {"host": stats.host} | ({} if stats.disk is None else {"disk": stats.disk})
    for field, text in (("bytes", "Bytes held"), ("entries", "Pages and snapshots held")):
        gauge = GaugeMetricFamily(f"inkling_prefix_tier_{field}", f"{text}.", labels=["tier"])
        for name, tier in tiers.items():
            gauge.add_metric([name], getattr(tier, field))
        yield gauge
    for field, text in (
        ("hits", "Pages and snapshots found"),
        ("misses", "Pages and snapshots asked for and not found"),
        ("evictions", "Pages and snapshots given up for room"),
        ("dropped", "Pages and snapshots that were not kept"),
        ("corrupt", "Damaged or foreign files, which were removed"),
        ("errors", "Reads and writes that failed"),
    ):
        counter = CounterMetricFamily(f"inkling_prefix_tier_{field}", f"{text}.", labels=["tier"])
        for name, tier in tiers.items():
            counter.add_metric([name], getattr(tier, field))
        yield counter


def _speculation(stats: SpeculationSnapshot) -> Iterator[Metric]:
    """Names after inkling_ are SGLang's where it has them."""
    gauges = {
        "inkling_spec_accept_length": (
            "Tokens a verification gave lately: accepted drafts and the sampled token.",
            stats.accept_length,
        ),
        "inkling_spec_accept_rate": ("Share of drafts accepted lately.", stats.accept_rate),
        "inkling_spec_num_steps": ("Draft steps of the last round.", stats.num_steps),
        "inkling_spec_num_draft_tokens": (
            "Tokens a row verifies after that round: its drafts and one more.",
            stats.num_steps + 1,
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(name, text, value=value)
    counters = {
        "inkling_spec_rounds": ("Verification forwards.", stats.rounds),
        "inkling_spec_verify_calls": ("Verifications, one a row.", stats.verifications),
    }
    for name, (text, count) in counters.items():
        yield CounterMetricFamily(name, text, value=count)
    yield _by_number(
        "inkling_spec_proposed_drafts", "Drafts verified, by depth.", "depth", stats.drafted
    )
    yield _by_number(
        "inkling_spec_correct_drafts", "Drafts accepted, by depth.", "depth", stats.accepted
    )
    yield _by_number(
        "inkling_spec_verifications",
        "Verifications by how many drafts they accepted.",
        "correct_drafts",
        stats.lengths,
    )


def _by_number(name: str, text: str, label: str, counts: Sequence[int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for number, count in enumerate(counts):
        family.add_metric([str(number)], count)
    return family


def _by_pool(name: str, text: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["pool"])
    for pool, value in values.items():
        family.add_metric([pool], value)
    return family


def watch(metrics: PrometheusMetrics, engine: Any) -> None:
    """Add the gauges of `engine` to the registry."""
    metrics.registry.register(EngineGauges(engine))


def exposition(metrics: PrometheusMetrics) -> bytes:
    """The text Prometheus scrapes."""
    return generate_latest(metrics.registry)
