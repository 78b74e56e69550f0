"""I1-I7, once for every host.

    I1  keys for a query at p: max(0, p - window + 1) .. p, its own request's.
    I2  a token with slot 0 has no effect; its output is finite.
    I3  re-running positions p.. overwrites, never accumulates.
    I4  results do not depend on the batch, padding or chunk borders.
    I5  host bounds (num_rows, max_q, max_kv, ...) bound what the device tensors say.
    I6  rows may be empty.
    I7  row order is arbitrary; no two rows share a slot except 0.

A host's test file subclasses HostInvariants and provides the fixture `make`.
"""

from __future__ import annotations

import random

import pytest
import torch

from inkling_rocm.host import CONV_STREAMS
from tests.host_invariants.harness import Probe, Row, state_of


def forward(harness, model, rows, tokens, **padding):
    """Run the model over the rows' next tokens. Returns: logits of every token, per row."""
    host = harness.step(rows, **padding)
    ids = torch.zeros(host.meta.num_tokens, dtype=torch.int64, device=host.meta.positions.device)
    flat = [token for row in rows for token in tokens[row.request][: row.length]]
    ids[: len(flat)] = torch.tensor(flat, dtype=torch.int64)
    with torch.inference_mode():
        hidden = model.forward(ids, host)
        assert torch.isfinite(hidden).all(), "I2: an output is not finite"
        logits = model.logits(hidden[: len(flat)], host)
    for row in rows:
        tokens[row.request] = tokens[row.request][row.length :]
    return dict(zip([r.request for r in rows], logits.split([r.length for r in rows]), strict=True))


def prompts(count, length, salt=0):
    return [[(29 * i + 7 * r + salt) % 150 for i in range(length)] for r in range(count)]


class HostInvariants:
    """Subclasses provide `make(**options) -> HostHarness` (options: page_size, chunk) and `model`,
    a real model of the harness's config."""

    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_i1_every_query_sees_its_own_past(self, make, seed, page_size):
        rng = random.Random(seed)
        harness = make(page_size=page_size)
        probe = Probe(harness.config)
        live: dict[int, int] = {}
        for _ in range(60):
            if len(live) < 4 and (not live or rng.random() < 0.3):
                live[harness.open()] = 0
            if len(live) > 1 and rng.random() < 0.1:
                gone = rng.choice(list(live))
                harness.close(gone)
                del live[gone]
            chosen = rng.sample(list(live), rng.randint(1, len(live)))
            rows = [Row(r, rng.choice((1, 1, 1, 2, 5, 9, 20))) for r in chosen]
            rows = [row for row in rows if live[row.request] + row.length <= 100] or [
                Row(min(live, key=live.get), 1)
            ]
            probe.run(harness.step(rows), rows)
            for row in rows:
                live[row.request] += row.length

    def test_i2_padding_changes_nothing(self, make, model):
        padded, plain = make(), make()
        ids = prompts(2, 40)
        for harness in (padded, plain):
            assert [harness.open(), harness.open()] == [1, 2]
        left = {"padded": {1: ids[0], 2: ids[1]}, "plain": {1: ids[0], 2: ids[1]}}
        for lengths, padding in (
            ((11, 20), {"pad_tokens": 5, "pad_rows": 2}),
            ((1, 1), {"pad_tokens": 3}),
            ((2, 1), {"pad_rows": 1}),
            ((1, 1), {"pad_tokens": 1, "pad_rows": 1}),
        ):
            rows = [Row(1, lengths[0]), Row(2, lengths[1])]
            found = forward(padded, model, rows, left["padded"], **padding)
            wanted = forward(plain, model, rows, left["plain"])
            for request in (1, 2):
                assert_close(found[request], wanted[request])
        rows = [Row(1, 1)]
        host, other = padded.step(rows, pad_tokens=7), plain.step(rows)
        assert int((host.kv(0).slot == 0).sum()) == 7
        for a, b in zip(state_of(host, padded.config), state_of(other, plain.config), strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)

    def test_i3_rerunning_overwrites(self, make, model):
        harness, plain = make(), make()
        if not harness.max_rewind:
            pytest.skip("this host cannot take tokens back")
        ids = prompts(1, 60)[0]
        wrong = [(token + 1) % 150 for token in ids]
        for h in (harness, plain):
            assert h.open() == 1
        left, straight = {1: list(ids)}, {1: list(ids)}
        forward(harness, model, [Row(1, 14)], left)
        forward(plain, model, [Row(1, 14)], straight)
        at = 14
        for taken_back in range(1, harness.max_rewind + 1):
            draft = {1: [ids[at], *wrong[at + 1 : at + 1 + taken_back]]}
            forward(harness, model, [Row(1, 1 + taken_back)], draft)
            harness.rewind(1, taken_back)
            left[1] = ids[at + 1 :]
            forward(plain, model, [Row(1, 1)], straight)
            found = forward(harness, model, [Row(1, 2)], left)
            assert_close(found[1], forward(plain, model, [Row(1, 2)], straight)[1])
            at += 3

    @pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 16, 33])
    def test_i4_chunks_and_neighbours_change_nothing(self, make, model, chunk):
        ids = prompts(3, 45, salt=3)
        alone = []
        for request_ids in ids:
            harness = make()
            assert harness.open() == 1
            alone.append(forward(harness, model, [Row(1, 45)], {1: request_ids})[1])
        harness = make()
        left = {harness.open(): request_ids for request_ids in ids}
        found = {request: [] for request in left}
        step = 0
        while any(left.values()):
            # The second request moves one token at a time, the third only every other step.
            sizes = {1: chunk, 2: 1, 3: chunk if step % 2 else 0}
            if step > 100:
                sizes[2] = sizes[3] = 45
            rows = [Row(r, min(sizes[r], len(left[r]))) for r in left]
            rows = [row for row in rows if row.length]
            if rows:
                for request, logits in forward(harness, model, rows, left).items():
                    found[request].append(logits)
            step += 1
        for request, wanted in enumerate(alone, 1):
            assert_close(torch.cat(found[request]), wanted)

    def test_i5_bounds_types_and_shapes(self, make):
        harness = make()
        requests = [harness.open() for _ in range(3)]
        for lengths, padding in (
            ((5, 1, 8), {}),
            ((1, 1, 1), {}),
            ((1, 1, 1), {"pad_tokens": 2}),
            ((3, 0, 2), {"pad_rows": 2}),
        ):
            rows = [Row(r, n) for r, n in zip(requests, lengths, strict=True)]
            host = harness.step(rows, **padding)
            meta = host.meta
            q_len = meta.cu_seqlens_q.diff()
            B, T = meta.num_rows, meta.num_tokens
            assert sum(lengths) + padding.get("pad_tokens", 0) == T
            assert meta.cu_seqlens_q.tolist()[0] == 0
            assert int(meta.cu_seqlens_q[-1]) == T
            for tensor, size in (
                (meta.positions, T),
                (meta.token_row, T),
                (meta.cu_seqlens_q, B + 1),
                (meta.q_start, B),
                (meta.kv_len, B),
            ):
                assert tensor.dtype == torch.int32
                assert tensor.shape == (size,)
            assert int(q_len.max()) <= meta.max_q
            assert int(meta.kv_len.max()) <= meta.max_kv
            assert torch.equal(meta.kv_len, meta.q_start + q_len)
            assert meta.q_uniform == 0 or (q_len == meta.q_uniform).all()
            if meta.kind == "decode":
                assert meta.q_uniform == 1
            rows_of = torch.arange(B).repeat_interleave(q_len)
            assert torch.equal(meta.token_row.long(), rows_of)
            first = meta.cu_seqlens_q[:-1].long()[rows_of]
            expected = meta.q_start.long()[rows_of] + torch.arange(T) - first
            assert torch.equal(meta.positions.long(), expected)
            self._check_views(harness, host)

    @staticmethod
    def _check_views(harness, host):
        text, meta = harness.config.text, host.meta
        B, T = meta.num_rows, meta.num_tokens
        for layer in range(text.num_layers):
            kv = host.kv(layer)
            attention = text.attention(layer)
            assert kv.page_size == harness.page_size
            assert kv.window == attention.window
            shape = (harness.page_size, attention.num_kv_heads, attention.head_dim)
            assert kv.k.shape[1:] == kv.v.shape[1:] == shape
            assert kv.k.stride()[-2:] == (attention.head_dim, 1)
            assert kv.page_table.dtype == kv.first_page.dtype == torch.int32
            assert kv.page_table.shape[0] == B
            assert kv.first_page.shape == (B,)
            assert kv.slot.dtype == torch.int64
            assert kv.slot.shape == (T,)
            for stream in CONV_STREAMS:
                ring = host.conv(layer, stream)
                kv_channels = attention.num_kv_heads * attention.head_dim
                channels = kv_channels if stream in ("k", "v") else text.hidden_size
                assert ring.state.shape[2] == channels
                assert ring.state.shape[1] >= text.conv_taps - 1
                assert ring.state.stride(-1) == 1
                assert ring.slot.dtype == ring.history.dtype == torch.int32
                assert ring.slot.shape == ring.history.shape == (B,)
                assert (ring.history <= meta.q_start).all()
                assert ((ring.token_slot == 0) == (kv.slot == 0)).all()

    def test_i6_rows_may_be_empty(self, make, model):
        ids = prompts(2, 30)
        harness, plain = make(), make()
        for h in (harness, plain):
            assert [h.open(), h.open()] == [1, 2]
        left, other = {1: ids[0], 2: ids[1]}, {1: ids[0], 2: ids[1]}
        for lengths in ((9, 0), (0, 4), (3, 7), (0, 1), (6, 0)):
            rows = [Row(1, lengths[0]), Row(2, lengths[1])]
            found = forward(harness, model, rows, left)
            wanted = forward(plain, model, [r for r in rows if r.length], other)
            for request, logits in wanted.items():
                assert_close(found[request], logits)

    def test_i7_row_order_is_arbitrary_and_slots_are_not_shared(self, make, model):
        ids = prompts(4, 30)
        forwards, backwards = make(), make()
        left = [{h.open(): r for r in ids} for h in (forwards, backwards)]
        for lengths in ((9, 3, 17, 1), (1, 1, 1, 1), (4, 2, 1, 8)):
            rows = [Row(r + 1, n) for r, n in enumerate(lengths)]
            found = forward(forwards, model, rows, left[0])
            other = forward(backwards, model, rows[::-1], left[1])
            for request in found:
                assert_close(found[request], other[request])
            host = forwards.step([Row(r, 0) for r in range(1, 5)])
            assert len(set(host.conv(0, "k").slot.tolist()) - {0}) == 4
        host = forwards.step([Row(r, 2) for r in range(1, 5)], pad_tokens=3)
        for layer in range(forwards.config.text.num_layers):
            slots = host.kv(layer).slot
            assert len(slots[slots > 0].unique()) == 8


def assert_close(found, wanted):
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert error < 1e-5, f"relative error {error}"
