"""SGLang's real engine, on a CPU, with our plugin: its greedy tokens are transformers'."""

from __future__ import annotations

import pytest

from tests.sglang_plugin.checkpoint import oracle_tokens, write_checkpoint
from tests.sglang_plugin.run_engine import needs_sglang, run_scenarios
from tests.sglang_plugin.scenarios import SCENARIOS

pytestmark = [pytest.mark.sglang, needs_sglang]
SHORT = ["cold", "chunked", "prefix hit", "two in a batch"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("sglang") / "tiny")


def expected(checkpoint, name: str) -> list[list[int]]:
    scenario = SCENARIOS[name]
    prompts = scenario.prompts
    if scenario.follow_up:
        count, tail = scenario.follow_up
        prompts = [p + oracle_tokens(checkpoint, p, count) + tail for p in prompts]
    return [oracle_tokens(checkpoint, prompt, scenario.new_tokens) for prompt in prompts]


def check(checkpoint, results: dict, text: str, page_size: int, names: list[str]) -> None:
    assert set(results) == set(names), text[-4000:]
    for name in names:
        assert [r["ids"] for r in results[name]] == expected(checkpoint, name), name
        if page_size <= 64 and SCENARIOS[name].cached is not None:
            assert tuple(r["cached"] for r in results[name]) == SCENARIOS[name].cached, name


@pytest.mark.parametrize("graphs", ["", "1"], ids=["eager", "graphs"])
def test_tokens_are_transformers(checkpoint, tmp_path, graphs):
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", SHORT, SGLANG_STUB_GRAPHS=graphs
    )
    assert "inkling-rocm serves this model" in text
    assert ("laid out as for graphs" in text) == bool(graphs)
    check(checkpoint, results, text, 64, SHORT)


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_every_scenario_on_every_page_size(checkpoint, tmp_path, page_size):
    names = [name for name in SCENARIOS if name != "retraction"]
    results, text = run_scenarios(checkpoint, tmp_path / "out.json", names, page_size=page_size)
    check(checkpoint, results, text, page_size, names)


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_decode_as_graphs_lay_it_out(checkpoint, tmp_path, page_size):
    """Everything a decode graph records, over padded buffers, run without recording."""
    names = [name for name in SCENARIOS if name != "retraction"]
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", names, page_size=page_size, SGLANG_STUB_GRAPHS="1"
    )
    check(checkpoint, results, text, page_size, names)
    assert "laid out as for graphs" in text


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_retracted_requests_are_resumed(checkpoint, tmp_path, page_size):
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", ["retraction"], page_size=page_size,
        SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="17",
    )  # fmt: skip
    check(checkpoint, results, text, page_size, ["retraction"])
    assert max(r["retractions"] for r in results["retraction"]) > 0


@pytest.mark.full
def test_zeroed_snapshots_change_the_prefix_hits_only(checkpoint, tmp_path):
    """The negative control: the tests above do depend on the snapshots."""
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", SHORT, SGLANG_STUB_FAULT="zeroed snapshots"
    )
    assert results, text[-4000:]
    wrong = {
        name for name in SHORT if [r["ids"] for r in results[name]] != expected(checkpoint, name)
    }
    # The cold prompts stay right. Of the hits, the one that ends 13 tokens behind its snapshot
    # must notice; the other ends 22 behind it, and its choice of tokens may survive.
    assert {"two in a batch"} <= wrong <= {"prefix hit", "two in a batch"}


@pytest.mark.full
def test_a_flag_that_is_not_supported_stops_the_server(checkpoint, tmp_path):
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", ["cold"], arguments={"kv_cache_dtype": "fp8_e4m3"}
    )
    assert not results
    assert "inkling-rocm's SGLang plugin does not support --kv-cache-dtype" in text


@pytest.mark.full
def test_a_plugin_that_cannot_be_imported_stops_the_server(checkpoint, tmp_path):
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", ["cold"], SGLANG_STUB_FAULT="broken plugin"
    )
    assert not results
    assert "inkling-rocm is installed but cannot serve" in text
    assert "broken on purpose" in text


@pytest.mark.full
def test_the_external_model_package_alone_selects_us(checkpoint, tmp_path):
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", ["cold"],
        SGLANG_PLUGINS="sglang_cpu_stub",
        SGLANG_EXTERNAL_MODEL_PACKAGE="inkling_rocm.sglang_plugin.models",
    )  # fmt: skip
    check(checkpoint, results, text, 64, ["cold"])


@pytest.mark.full
@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_ranks_give_the_tokens_of_one(checkpoint, tmp_path, ep_size):
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", SHORT, arguments={"tp_size": 2, "ep_size": ep_size},
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
    )  # fmt: skip
    check(checkpoint, results, text, 64, SHORT)


@pytest.mark.full
def test_without_the_plugin_sglang_loses_a_key(checkpoint, tmp_path):
    """SGLang's own decode sees one key less than the window: the tests above run our code."""
    results, text = run_scenarios(
        checkpoint, tmp_path / "out.json", ["cold"],
        SGLANG_PLUGINS="sglang_cpu_stub", SGLANG_STUB_FAULT="SGLang's own model",
    )  # fmt: skip
    assert results, text[-4000:]
    assert "inkling-rocm serves this model" not in text
    short, long = zip(results["cold"], expected(checkpoint, "cold"), strict=True)
    # The first token comes from the prefill, whose window is right; so are short contexts.
    assert short[0]["ids"] == short[1]
    assert long[0]["ids"][0] == long[1][0]
    assert long[0]["ids"] != long[1]
