"""A window of engine steps under torch.profiler on the CPU, and the table it makes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.engine import EngineArgs
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from inkling_rocm.ops.registry import OP_NAMES
from inkling_rocm.profile.run import WARMUP, profile_with_torch
from inkling_rocm.profile.table import OpRow, Profile, merged
from inkling_rocm.profile.window import Window
from kernel_base.arch import arch_named
from tests.engine.tiny import tiny_config

LAYERS, STEPS, BATCH = 3, 3, 2


def tiny_parts() -> EngineParts:
    """A model of its own: the profiler attaches to it for good."""
    config = tiny_config()
    weights = allocate(config, dtype=torch.float32, device="cpu")
    fill_dummy(config, weights, seed=3)
    ops = resolve_ops(config, arch_named("cpu"), dtype="float32")
    return EngineParts(
        config=config,
        model=InklingModel(config, weights, ops),
        tokenizer=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def run(phase: str, **options) -> Profile:
    args = EngineArgs(
        model_path="tiny", skip_tokenizer_init=True, page_size=16, max_running_requests=4,
        max_total_tokens=2000,
    )  # fmt: skip
    given = {"batch": BATCH, "input_len": 16, "steps": STEPS, **options}
    return profile_with_torch(args, phase=phase, parts=tiny_parts(), **given)


def test_decode_steps():
    found = run("decode")
    assert found.steps == STEPS
    rows = {row.op: row for row in found.rows}
    assert set(rows) == set(OP_NAMES)
    calls = {op: row.calls / STEPS for op, row in rows.items()}
    assert calls["rel_attention"] == LAYERS
    assert calls["linear"] == calls["residual_conv_norm"] == 2 * LAYERS
    assert calls["experts"] == calls["gate"] == 2
    assert calls["lm_head"] == calls["embed"] == calls["dense_mlp"] == 1
    assert all(row.us > 0 and row.launches > 0 and row.bytes > 0 for row in rows.values())
    text = tiny_config().text
    head = (text.vocab_size * text.hidden_size + BATCH * text.hidden_size) * 4
    head += BATCH * text.unpadded_vocab_size * 4
    assert rows["lm_head"].bytes == STEPS * head
    assert sum(row.us for row in found.rows) < found.wall_us * 1.05
    lines = found.as_text().splitlines()
    assert len(lines) == 2 + len(rows)  # no ceiling is known for a CPU


def test_prefill_steps():
    found = run("prefill", steps=2)
    assert found.steps == 2
    assert {row.op: row.calls for row in found.rows}["rel_attention"] == 2 * LAYERS


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_engine_is_made_for_its_requests_alone(phase, caplog):
    """Warming up over prompts that never come compiles kernels for minutes on a GPU."""
    with caplog.at_level("INFO"):
        run(phase)
    new = {"decode": STEPS + WARMUP + 3, "prefill": 1}[phase]
    assert f"context {16 + new} (checkpoint: 512), prompt chunk {4 * (16 + new)}" in caplog.text


def test_prompts_must_be_longer_than_the_batch():
    with pytest.raises(ValueError, match="more than twice the batch"):
        run("decode", input_len=4)


def test_the_window_opens_after_the_warmup_and_closes_itself():
    events = []
    window = Window(
        is_step=lambda tokens: tokens == 1, warmup=1, steps=2,
        start=lambda: events.append("start"), wait=lambda: events.append("wait"),
        stop=lambda: events.append("stop"), mark=lambda name: nullcontext(events.append(name)),
    )  # fmt: skip
    for tokens in (5, 1, 1, 1, 1):
        window("stem.embed", "embed", lambda x: x, (torch.zeros(tokens),), {})
    assert events == ["start", "op:embed", "op:embed", "wait", "stop"]
    assert window.measured == 2
    assert window.calls["embed"].calls == 2


def test_a_prefill_in_between_ends_a_decode_window():
    events = []
    window = Window(
        is_step=lambda tokens: tokens == 1, warmup=0, steps=9,
        start=lambda: events.append("start"), wait=lambda: None,
        stop=lambda: events.append("stop"), mark=lambda name: nullcontext(),
    )  # fmt: skip
    for tokens in (1, 1, 7, 1):
        window("stem.embed", "embed", lambda x: x, (torch.zeros(tokens),), {})
    assert events == ["start", "stop"]
    assert window.calls["embed"].calls == 2


def test_rows_add_up_and_fractions_need_both_sides():
    rows = merged([OpRow(op="a", us=2.0, bytes=10), OpRow(op="b"), OpRow(op="a", us=3.0, calls=1)])
    assert rows[0] == OpRow(op="a", us=5.0, bytes=10, calls=1)
    assert rows[0].fraction(1e6) == pytest.approx(2.0)
    assert rows[0].fraction(0.0) is None
    assert rows[1].fraction(1e6) is None
