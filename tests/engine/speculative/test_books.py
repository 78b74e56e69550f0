"""What a speculating engine counts, chooses and simulates, through the engine."""

import pytest

from inkling_rocm.engine import EngineArgs, NoMetrics, SamplingParams
from inkling_rocm.server.context import ServerSettings
from inkling_rocm.server.serve import serve
from tests.engine.speculative.truth import TruthfulSampler
from tests.engine.tiny import VOCAB, tiny_engine, tiny_mtp_config

CONFIG = tiny_mtp_config()
PROMPTS = [[(7 * i + 31 * row + 3) % VOCAB for i in range(5 + row)] for row in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)


def generate(engine, params=GREEDY):
    return engine.generate(input_ids=PROMPTS, sampling_params=params)


def ids(results):
    return [result["output_ids"] for result in results]


@pytest.fixture(scope="module")
def plain():
    with tiny_engine(CONFIG) as engine:
        assert engine.stats().speculation is None
        results = generate(engine)
    assert "spec_verify_ct" not in results[0]["meta_info"]
    return ids(results)


def test_counts_agree_with_what_was_accepted(plain):
    with tiny_engine(CONFIG, speculative_num_steps=3, chunked_prefill_size=2) as engine:
        truth = TruthfulSampler(engine, 0.8)
        results = generate(engine)
        found = engine.stats().speculation
    assert ids(results) == plain
    assert sum(found.accepted) == truth.accepted > 30
    assert found.num_steps == 3
    assert sum(found.lengths) == found.verifications
    assert sum(n * count for n, count in enumerate(found.lengths)) == sum(found.accepted)
    assert found.accept_length == pytest.approx(1 + sum(found.accepted) / found.verifications, 0.02)
    assert 0 < found.timed_rounds < found.rounds, "those that computed prompts too are not timed"
    metas = [result["meta_info"] for result in results]
    assert sum(meta["spec_verify_ct"] for meta in metas) == found.verifications
    assert sum(meta["spec_num_correct_drafts"] for meta in metas) == sum(found.accepted)
    assert sum(meta["spec_num_proposed_drafts"] for meta in metas) == sum(found.drafted)
    for meta in metas:
        assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
        assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]


@pytest.mark.parametrize("chunk", [-1, 4])
def test_the_last_token_of_a_prompt_is_no_verification(chunk):
    """A prompt of one token, or one whose last chunk is one."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    with tiny_engine(CONFIG, speculative_num_steps=3, chunked_prefill_size=chunk) as engine:
        for length in (1, 5):
            engine.generate(input_ids=[7] * length, sampling_params=params)
        assert engine.stats().speculation.verifications == 0


class Rounds(NoMetrics):
    def __init__(self):
        self.drafted = []

    def speculation_round(self, drafted, accepted, *, steps, seconds):
        self.drafted.append(list(drafted))


class Scripted:
    """A controller that goes through all step counts."""

    most = 8

    def __init__(self):
        self.rounds = 0

    def choose(self, batch):
        self.rounds += 1
        return 1 + self.rounds * 5 % 8

    def book(self, drafted, accepted, seconds, *, steps):
        pass


def test_outputs_do_not_depend_on_the_steps(plain):
    with tiny_engine(CONFIG, speculative_num_steps=8) as engine:
        TruthfulSampler(engine, 0.7)
        core = engine._core
        core.metrics = core.speculation._metrics = rounds = Rounds()
        core.speculation._adaptive = Scripted()
        assert ids(generate(engine)) == plain
    assert {max(drafted) for drafted in rounds.drafted} == set(range(1, 9))


def test_adaptive_steps_leave_the_outputs(plain):
    with tiny_engine(CONFIG, speculative_num_steps=8, speculative_adaptive=True) as engine:
        TruthfulSampler(engine, 0.0)
        assert ids(generate(engine)) == plain
        assert engine._core.speculation._adaptive.cost.measured(4, 8), "3 rows run as 4"


def test_simulated_acceptance():
    params = SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)
    args = {"speculative_num_steps": 4, "speculative_simulate_acceptance": 0.7}
    with tiny_engine(CONFIG, **args) as engine:
        assert "outputs are meaningless" in engine.model_name
        results = generate(engine, params)
        found = engine.stats().speculation
    assert [len(found) for found in ids(results)] == [300] * 3
    reached = found.verifications
    for accepted in found.accepted:
        assert accepted / reached == pytest.approx(0.7, abs=0.12)
        reached = accepted


def test_refusals():
    args = EngineArgs(
        model_path="demo", speculative_algorithm="EAGLE", speculative_simulate_acceptance=0.5
    )
    with pytest.raises(
        ValueError, match=r"\(speculative_simulate_acceptance\): outputs are meaningless"
    ):
        serve(args, ServerSettings(), host="127.0.0.1", port=0)
    with pytest.raises(ValueError, match=r"one rank of 8 alone \(rank_slice\): outputs are mean"):
        ServerSettings().check(EngineArgs(model_path="demo", rank_slice=8))
    with pytest.raises(ValueError, match=r"speculative_simulate_acceptance 1.5: wanted a prob"):
        EngineArgs(
            model_path="demo", speculative_algorithm="EAGLE", speculative_simulate_acceptance=1.5
        )
    with pytest.raises(ValueError, match="speculative_adaptive means nothing without"):
        EngineArgs(model_path="demo", speculative_adaptive=True)
    with pytest.raises(ValueError, match="speculative_eagle_topk means nothing without"):
        EngineArgs(model_path="demo", speculative_eagle_topk=2)
