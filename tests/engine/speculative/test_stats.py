"""Counts of speculation: snapshot, Prometheus, meta_info."""

from types import SimpleNamespace

from prometheus_client import generate_latest

from inkling_rocm.engine import EngineStats, NoMetrics
from inkling_rocm.engine.request import DraftCounts, Update
from inkling_rocm.engine.sglang_form import _Output
from inkling_rocm.engine.speculative.adaptive import AdaptiveSteps
from inkling_rocm.engine.speculative.stats import SpeculationStats
from inkling_rocm.server.metrics import PrometheusMetrics, watch


class Recorder(NoMetrics):
    def __init__(self):
        self.rounds = []

    def speculation_round(self, drafted, accepted, *, steps, seconds):
        self.rounds.append((drafted, accepted, steps, seconds))


def test_counts_by_hand():
    metrics = Recorder()
    stats = SpeculationStats(3, metrics)
    assert stats.choose(2) == 3
    stats.book([3, 3], [2, 0], 0.5)
    stats.book([2, 0], [2, 0], None, steps=3)
    stats.book([], [], 1.0)
    found = stats.snapshot()
    assert (found.rounds, found.verifications, found.num_steps) == (2, 4, 3)
    assert (found.drafted, found.accepted, found.lengths) == ((3, 3, 2), (2, 2, 0), (2, 0, 2, 0))
    assert (found.seconds, found.timed_rounds) == (0.5, 1)
    assert abs(found.accept_length - 2.0) < 0.01
    assert abs(found.accept_rate - 0.5) < 0.01
    assert metrics.rounds == [([3, 3], [2, 0], 3, 0.5), ([2, 0], [2, 0], 3, None)]


def test_the_steps_are_those_chosen():
    """Rows that must end soon verify fewer drafts than are made for the others."""
    stats = SpeculationStats(3, NoMetrics())
    stats.book([1, 0], [1, 0], None, made=2)
    assert stats.snapshot().num_steps == 2


def test_lately_forgets():
    stats = SpeculationStats(2, NoMetrics())
    for accepted in (0, 2):
        for _ in range(200):
            stats.book([2] * 50, [accepted] * 50, None)
    assert stats.snapshot().accept_length > 2.99


def test_adaptive_steps_are_chosen_and_taught():
    adaptive = AdaptiveSteps(4)
    stats = SpeculationStats(4, NoMetrics(), adaptive)
    for _ in range(300):
        steps = stats.choose(1)
        stats.book([steps], [0], 0.01 * (1 + steps), steps=steps)
    assert adaptive.settled(1) == 1
    assert stats.snapshot().rounds == 300


def engine_with(speculation):
    """What the gauges need of an engine."""
    stats = EngineStats(
        queued=0,
        running=0,
        pages_used={},
        pages_total={},
        conv_slots_used=0,
        conv_slots_total=0,
        prompt_tokens=0,
        generated_tokens=0,
        preemptions=0,
        requests_finished=0,
        speculation=speculation,
    )
    return SimpleNamespace(stats=lambda: stats)


def test_prometheus():
    metrics = PrometheusMetrics()
    stats = SpeculationStats(2, metrics)
    stats.book([2, 2], [1, 2], 0.004)
    watch(metrics, engine_with(stats.snapshot()))
    text = generate_latest(metrics.registry).decode()
    for line in (
        "inkling_spec_accept_length 2.5",
        "inkling_spec_accept_rate 0.75",
        "inkling_spec_num_steps 2.0",
        "inkling_spec_num_draft_tokens 3.0",
        "inkling_spec_rounds_total 1.0",
        "inkling_spec_verify_calls_total 2.0",
        'inkling_spec_proposed_drafts_total{depth="1"} 2.0',
        'inkling_spec_correct_drafts_total{depth="0"} 2.0',
        'inkling_spec_correct_drafts_total{depth="1"} 1.0',
        'inkling_spec_verifications_total{correct_drafts="2"} 1.0',
        "inkling_spec_round_seconds_count 1.0",
    ):
        assert f"{line}\n" in text
    plain = PrometheusMetrics()
    watch(plain, engine_with(None))
    assert "inkling_spec_accept" not in generate_latest(plain.registry).decode()


def test_meta_info():
    counts = DraftCounts().after(4, 3).after(4, 0).after(4, 3)
    generation = SimpleNamespace(return_logprob=False)
    output = _Output(generation, SimpleNamespace(rid="r"), 0)
    output.add(Update(index=0, token_ids=(1,), text="", completion_tokens=10, draft_counts=counts))
    meta = output.as_dict()["meta_info"]
    assert meta["spec_verify_ct"] == 3
    assert (meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"]) == (6, 12)
    assert meta["spec_accept_rate"] == 0.5
    assert meta["spec_accept_length"] == 10 / 3
    assert meta["spec_correct_drafts_histogram"] == [1, 0, 0, 2]
    output.add(Update(index=0, token_ids=(1,), text=""))
    assert not any(name.startswith("spec_") for name in output.as_dict()["meta_info"])
