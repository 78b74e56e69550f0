"""bench/speculation: what it counts, its tables, and the whole of it on a tiny model."""

import json
from types import SimpleNamespace

import pytest

from bench.rows import evidence
from bench.speculation import tables
from bench.speculation.gate import gate
from bench.speculation.gate import main as compare
from bench.speculation.plot import plot
from bench.speculation.rounds import MARK, RoundWatch, runtime_calls
from bench.speculation.run import main, waits, way_of
from inkling_rocm.engine.request import TokenLogprob


def test_calls_between_the_marks_are_counted():
    events = [
        ("cudaStreamSynchronize", 0),  # starting the profiler
        (MARK, 1),
        ("cudaGraphLaunch", 2),
        ("aten::add", 2),
        ("cudaEventSynchronize", 3),
        (MARK, 4),
        ("hipMemcpy", 5),
        (MARK, 6),
        ("cudaDeviceSynchronize", 7),  # stopping it
    ]
    calls = runtime_calls(events)
    assert calls == {"cudaGraphLaunch": 1, "cudaEventSynchronize": 1, "hipMemcpy": 1}
    found = waits(SimpleNamespace(calls=calls, rounds=2))
    assert found["blocking_calls_per_round"] == 0.5
    assert found["event_waits_per_round"] == 0.5
    assert waits(SimpleNamespace(calls=None, rounds=2))["blocking_calls_per_round"] is None


def test_the_window_has_the_rounds_of_its_batch_only():
    watch = RoundWatch()
    watch.begin(2, skip=1, rounds=2, profiled=False)
    for drafted, accepted in (
        ([3], [3]),  # the other prompt is still computed
        ([3, 3], [3, 3]),  # skipped
        ([3, 3], [0, 0]),  # starts the clock
        ([3, 3], [1, 2]),
        ([3, 1], [0, 1]),
        ([3, 3], [3, 3]),  # after the end
    ):
        watch.speculation_round(drafted, accepted, steps=3, seconds=None)
    window = watch.window()
    assert watch.done.is_set()
    assert (window.rounds, window.drafted, window.accepted, window.tokens) == (2, 10, 4, 8)
    assert window.acceptance == 0.4
    assert window.tokens_per_s == pytest.approx(8 / sum(window.round_s))


def test_gate():
    def token(chosen, *top):
        return TokenLogprob(token_id=chosen, logprob=top[0][1], top=top)

    one, two, other = (
        token(n, (n, -0.5), (8, -0.55), (9, -0.9)) for n in (1, 2, 8)
    )  # fmt: skip
    wanted = [[one, two, one], [two, two, two]]
    assert gate(wanted, wanted) == "pass: 6 tokens"
    near = gate([[one, other, other], [two, two, two]], wanted)
    assert near == "pass: 4 of 6 tokens, 1 outputs part at near ties of up to 0.050 nats"
    far = [[one, token(9, (9, -0.5)), one], [two, two, two]]
    assert gate(far, wanted) == "differs from token 1 on, which is 0.400 nats less probable"
    unknown = [[one, token(7, (7, -0.5)), one], [two, two, two]]
    assert gate(unknown, wanted) == "differs from token 1 on, which is much less probable"
    with pytest.raises(ValueError, match="longer"):
        gate([[one], [two]], wanted)


def test_tables_without_rows():
    assert tables.rounds([]) == tables.acceptance([]) == tables.gates([]) == tables.NONE_YET


def test_a_row_a_way_makes_one_line():
    row = {
        "op": "round", "batch": 1, "steps": 8, "rounds_per_s": 90.0, "gate": "pass",
        "blocking_calls_per_round": 0.0, "event_waits_per_round": 1.0, "evidence": "measured",
        "device": "a GPU", "commit": "c",
    }  # fmt: skip
    rows = [
        {**row, "how": how, "p50_us": us} for how, us in zip(tables.WAYS, (1, 2, 3), strict=True)
    ]
    (line,) = tables.rounds(rows).splitlines()[2:]
    assert line == "| 1, 8 | 1 | 2 | 3 | 90.0 | 0.0 | 1.0 | pass | measured, a GPU, commit c |"
    ways = SimpleNamespace(decode=None, rounds=object(), speculation=object())
    engine = SimpleNamespace(_core=SimpleNamespace(executor=ways))
    found = [way_of(engine, apart=apart) for apart in (False, True)]
    ways.rounds = None
    assert (*found, way_of(engine, apart=False)) == tables.WAYS


def test_a_table_of_rows_of_several_commits_names_them_all():
    """And has the newest where something was measured again."""
    common = {"evidence": "measured", "device": "a GPU", "batch": 1, "probability": 0.5}
    rows = [
        {**common, "op": "acceptance", "steps": steps, "commit": commit, "tokens_per_s": speed}
        for steps, commit, speed in ((1, "old", 10.0), (2, "old", 20.0), (2, "new", 21.0))
    ]
    rows.append({**rows[0], "op": "round", "steps": 0, "commit": "plain", "tokens_per_s": 5.0})
    row = tables.acceptance(rows).splitlines()[-1]
    assert row == "| 1, 0.5 | 5.0 | 10.0 | 21.0 | measured, a GPU, commits plain, old, new |"
    with pytest.raises(ValueError, match="unpack"):  # kinds of evidence never share a table's row
        evidence(rows[0], {**rows[1], "evidence": "emulated"})


@pytest.mark.full
def test_a_whole_run(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = (
        "--tiny --device cpu --batches 1,2 --steps 1,2 --acceptances 0,1 --prompt 5 --rounds 4"
    )
    main([*options.split(), "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 + 2 * (2 + 4)
    assert {row["gate"] for row in rows} == {"pass: 128 tokens"}
    simulated = [row for row in rows if row["op"] == "acceptance"]
    assert all(row["acceptance"] == row["probability"] for row in simulated)
    assert tables.rounds(rows).count("\n| ") == 6
    assert "| 2, 1.0 |" in tables.acceptance(rows)
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="nothing to plot"):
        plot([], tmp_path / "none.png")
    main([*options.split(), "--acceptance-only", "--out", str(tmp_path / "more.jsonl")])
    more = [json.loads(line) for line in (tmp_path / "more.jsonl").read_text().splitlines()]
    assert len(more) == len(simulated)
    assert {row["gate"] for row in more} == {"not compared"}


@pytest.mark.full
def test_the_gate_of_a_tiny_model(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = "--tiny --device cpu --steps 1,2 --prompt 9 --prompts 2 --tokens 6 --dtypes float32"
    compare([*options.split(), "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["steps"] for row in rows] == [0, 1, 2]
    assert {row["gate"] for row in rows} == {"pass: 12 tokens"}
    table = tables.gates(rows).splitlines()
    assert table[0] == "| draft steps, how rounds run | float32 | evidence |"
    assert table[3].startswith("| 1, launched | pass: 12 tokens | measured, ")
