"""What is told about the cache: usage, stats, Prometheus; and the settings that shape it."""

from types import SimpleNamespace

import pytest
import torch

from inkling_rocm.engine import EngineArgs
from inkling_rocm.engine.free_memory import GIB
from inkling_rocm.engine.memory import build_pools, plan_memory
from inkling_rocm.server.metrics import PrometheusMetrics, exposition, watch
from tests.engine.tiny import tiny_config, tiny_engine

PROMPT = [(7 * i + 3) % 150 for i in range(70)]
PARAMS = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def test_usage_stats_and_metrics():
    with tiny_engine(page_size=16) as engine:
        for expected in (0, 64):
            result = engine.generate(input_ids=PROMPT, sampling_params=PARAMS)
            assert result["meta_info"]["cached_tokens"] == expected
            assert result["meta_info"]["prompt_tokens"] == 70
        stats = engine.stats()
        cache = stats.prefix_cache
        assert (cache.lookups, cache.hits, cache.hit_tokens) == (2, 1, 64)
        assert stats.prompt_tokens == 70 + 6
        assert cache.pages == {"global": 4, "window": 1}
        assert stats.pages_used == {"global": 0, "window": 0}
        metrics = PrometheusMetrics()
        watch(metrics, SimpleNamespace(stats=lambda: stats))
        text = exposition(metrics).decode()
    for line in (
        "inkling_prefix_cache_lookups_total 2.0",
        "inkling_prefix_cache_hits_total 1.0",
        "inkling_cached_tokens_total 64.0",
        'inkling_prefix_cache_pages{pool="global"} 4.0',
        'inkling_prefix_cache_evictions_total{short="snapshots"} 0.0',
        "inkling_prefix_cache_boundaries 1.0",
        "inkling_prefix_cache_snapshots 32.0",
    ):
        assert line in text


def test_no_cache_no_metrics():
    with tiny_engine(page_size=16, disable_radix_cache=True) as engine:
        stats = engine.stats()
        assert stats.prefix_cache is None
        metrics = PrometheusMetrics()
        watch(metrics, SimpleNamespace(stats=lambda: stats))
        assert b"prefix_cache" not in exposition(metrics)


def plan_of(**args):
    return plan_memory(
        tiny_config().text,
        EngineArgs(model_path="x", page_size=16, **args),
        dtype=torch.float32,
        device=torch.device("cpu"),
        free=args.pop("free", 4 * GIB),
    )


def test_snapshots_are_planned():
    assert plan_of(max_running_requests=8).snapshots == 32
    assert plan_of(max_running_requests=8, prefix_snapshots=5).snapshots == 5
    assert plan_of(max_running_requests=8, disable_radix_cache=True).snapshots == 0
    with_cache, without = plan_of(prefix_snapshots=7), plan_of(disable_radix_cache=True)
    windows = with_cache.window_pages - without.window_pages
    assert windows == 7 * 2, "each keeps a window, which touches two pages"
    _, rings = build_pools(
        tiny_config().text, with_cache, dtype=torch.float32, device=torch.device("meta")
    )
    assert list(rings.snapshot_slots) == list(range(33, 40))
    assert all(storage.shape[1] == 40 for storage in rings.storage)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prefix_snapshots": 0}, "prefix_snapshots 0: wanted at least 1"),
        ({"prefix_snapshots": 4, "disable_radix_cache": True}, "leave it out"),
    ],
)
def test_refusals(args, message):
    with pytest.raises(ValueError, match=message):
        EngineArgs(model_path="x", **args)


def test_too_many_snapshots_are_named():
    with pytest.raises(ValueError, match="or lower max_running_requests or prefix_snapshots"):
        plan_of(prefix_snapshots=10_000_000)
