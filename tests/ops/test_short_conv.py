"""short_conv against a loop over tokens and taps: ragged rows, ring lengths, planted hazards."""

from __future__ import annotations

import pytest
import torch

from inkling_rocm.host import BatchMeta, ConvStateView
from inkling_rocm.ops.short_conv import short_conv

CHANNELS = 5


def layout(rows):
    """(slot, start, length) rows -> meta, slot [B], token_slot [T], history [B] for 4 taps."""
    slot = torch.tensor([row[0] for row in rows], dtype=torch.int32)
    start = torch.tensor([row[1] for row in rows], dtype=torch.int32)
    length = torch.tensor([row[2] for row in rows], dtype=torch.int32)
    cu = torch.cat((torch.zeros(1, dtype=torch.int32), length.cumsum(0).int()))
    token_row = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(length)
    positions = start[token_row] + torch.arange(int(cu[-1]), dtype=torch.int32) - cu[token_row]
    meta = BatchMeta(
        kind="prefill",
        num_rows=len(rows),
        num_tokens=int(cu[-1]),
        q_uniform=0,
        max_q=int(length.max()),
        max_kv=int((start + length).max()),
        positions=positions,
        cu_seqlens_q=cu,
        q_start=start,
        kv_len=start + length,
        token_row=token_row,
    )
    token_slot = torch.where(slot[token_row] == 0, 0, 1 + torch.arange(len(token_row)))
    return meta, slot, token_slot, start


def convolve_whole(x, weight):
    """Float64 loop over a whole sequence from position 0."""
    taps = len(weight)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        out[t] = x[t]
        for distance in range(taps):
            if t >= distance:
                out[t] += weight[taps - 1 - distance].double() * x[t - distance]
    return out


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("extra", [0, 1, 4, 9])
def test_any_split_of_two_sequences_equals_the_whole(taps, extra):
    torch.manual_seed(taps * 10 + extra)
    ring_len = max(taps - 1, 1) + extra
    weight = torch.randn(taps, CHANNELS)
    sequences = [torch.randn(37, CHANNELS).double() for _ in range(2)]
    state = torch.full((3, ring_len, CHANNELS), float("nan")).double()
    state[0] = 0
    done, outputs = [0, 0], [[], []]
    step = 0
    while done != [37, 37]:
        lengths = [min(37 - done[i], (step * (i + 3) + i) % 7) for i in range(2)]
        step += 1
        rows = [(0, 0, 2), (2, done[1], lengths[1]), (1, done[0], lengths[0])]
        meta, slot, token_slot, start = layout(rows)
        chunk = torch.cat(
            (
                torch.randn(2, CHANNELS).double(),
                sequences[1][done[1] : done[1] + lengths[1]],
                sequences[0][done[0] : done[0] + lengths[0]],
            )
        )
        ring = ConvStateView(
            state=state, slot=slot, token_slot=token_slot, history=start.clamp(max=taps - 1)
        )
        y = short_conv(chunk, weight, meta, ring)
        assert y.isfinite().all()
        outputs[1].append(y[2 : 2 + lengths[1]])
        outputs[0].append(y[2 + lengths[1] :])
        done = [done[i] + lengths[i] for i in range(2)]
        assert (state[0] == 0).all(), "padding rows wrote to the sink"
    for i in range(2):
        torch.testing.assert_close(
            torch.cat(outputs[i]), convolve_whole(sequences[i], weight), rtol=1e-12, atol=1e-12
        )


def test_history_zero_runs_fresh_and_stale_ring_rows_are_not_read():
    meta, slot, token_slot, _ = layout([(1, 10, 3)])
    state = torch.full((2, 3, CHANNELS), float("nan")).double()
    x = torch.randn(3, CHANNELS).double()
    weight = torch.randn(4, CHANNELS)
    ring = ConvStateView(
        state=state, slot=slot, token_slot=token_slot, history=torch.zeros(1, dtype=torch.int32)
    )
    torch.testing.assert_close(short_conv(x, weight, meta, ring), convolve_whole(x, weight))


def test_tokens_of_slot_zero_leave_the_ring_alone():
    meta, slot, token_slot, start = layout([(1, 4, 3)])
    token_slot[0] = 0
    state = torch.randn(2, 8, CHANNELS).double()
    before = state.clone()
    x = torch.randn(3, CHANNELS).double()
    ring = ConvStateView(state=state, slot=slot, token_slot=token_slot, history=start.clamp(max=3))
    short_conv(x, torch.randn(4, CHANNELS), meta, ring)
    changed = (state != before).any(-1)
    assert changed.nonzero().tolist() == [[1, 5], [1, 6]]


def test_rerunning_positions_overwrites():
    """A rejected draft is simply run over: the ring needs no rollback."""
    weight = torch.randn(4, CHANNELS)
    sequence = torch.randn(12, CHANNELS).double()
    state = torch.full((2, 3 + 4, CHANNELS), float("nan")).double()

    def run(rows, x):
        meta, slot, token_slot, start = layout(rows)
        ring = ConvStateView(
            state=state, slot=slot, token_slot=token_slot, history=start.clamp(max=3)
        )
        return short_conv(x, weight, meta, ring)

    run([(1, 0, 8)], sequence[:8])
    run([(1, 8, 4)], torch.randn(4, CHANNELS).double())  # a draft, wholly rejected
    y = run([(1, 8, 4)], sequence[8:])
    torch.testing.assert_close(y, convolve_whole(sequence, weight)[8:])


def test_snapshot_copies_the_rows_before_its_boundary():
    meta, slot, token_slot, start = layout([(1, 0, 6), (2, 0, 4)])
    state = torch.zeros(4, 5, CHANNELS).double()
    x = torch.randn(10, CHANNELS).double()
    ring = ConvStateView(
        state=state,
        slot=slot,
        token_slot=token_slot,
        history=start,
        snapshot_slot=torch.tensor([3, 0], dtype=torch.int32),
        snapshot_position=torch.tensor([5, 0], dtype=torch.int32),
    )
    short_conv(x, torch.randn(4, CHANNELS), meta, ring)
    for position in (2, 3, 4):
        assert torch.equal(state[3, position % 5], x[position])
    assert (state[3, [0, 1]] == 0).all()
    assert (state[0] == 0).all()
