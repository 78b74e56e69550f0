"""The sampler of a GPU engine: parameters of a step to the device in one copy, tokens stay there.

`sampler.py` is the specification; `kernels/sampling.py` draws. Token counts of penalised sequences
live on the device, one row a sequence slot, and the kernel keeps them up to date, so that a step
needs nothing the host has not known before the previous step ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.random import signed64
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.engine.sampler import SampleRow
from inkling_rocm.engine.speculative.verification import draft_row
from inkling_rocm.kernels.sampling import SamplingEdits, SamplingRows, sample_rows
from inkling_rocm.kernels.verification import VerifyRows, verify_rows

_FIELDS = (
    ("top_p", np.float64),
    ("seed", np.int64),
    ("position", np.int64),
    ("temperature", np.float32),
    ("log_min_p", np.float32),
    ("top_k", np.int32),
)
_EDIT_FIELDS = (
    "penalties", "count_row", "cu_extra", "extra_ids", "extra", "allowed", "allowed_row"
)  # fmt: skip


class DeviceSampler:
    """Draws on one device.

    Args:
        vocabulary: real tokens. slots: sequence slots (rows of token counts).
        arch: architecture name, for the tuning rows.
    """

    def __init__(self, *, vocabulary: int, slots: int, device: torch.device, arch: str):
        self.vocabulary = vocabulary
        self.device = device
        self.arch = arch
        self.counts = torch.zeros(slots, vocabulary, dtype=torch.int16, device=device)

    def admit(self, slot: int, edits: LogitEdits) -> None:
        """Take over the token counts of a sequence that gets `slot`, as the host knows them."""
        if edits.counts is None:
            return
        row = self.counts[slot]
        row.zero_()
        ids = torch.from_numpy(edits.counts.ids.copy())
        known = np.minimum(edits.counts.counts, 16382).astype(np.int16) * 2
        seen = int(edits.params.repetition_penalty != 1.0)
        row[ids.to(self.device)] = torch.from_numpy(known + np.int16(seen)).to(self.device)

    def sample(
        self,
        logits_nV: Tensor,
        rows: Sequence[SampleRow],
        slots: Sequence[int],
        *,
        logprobs: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Enqueue the drawing of one token a row; waits for nothing.

        Args:    logits_nV: fp32 [n, V], left as they are. slots: of the rows' sequences.
        Returns: tokens int64 [n] and log probabilities fp32 [n] on the device, see sample_rows.
        """
        return sample_rows(logits_nV, self.rows(rows, slots), arch=self.arch, logprobs=logprobs)

    def verify(
        self,
        logits_BMV: Tensor,
        drafts_BN: Tensor,
        draft_logits_BNV: Tensor | None,
        rows: Sequence[SampleRow],
        slots: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Enqueue the verification of drafts, see speculative/verification.py; waits for nothing.

        Args:
            draft_logits_BNV: what the drafts were drawn from, for rejection sampling; None =
                accept where equal.
            slots: of the rows' sequences, whose token counts follow.
        Returns: tokens int64 [B, N + 1] and accepted int64 [B] on the device, see verify_rows.
        """
        found = self.verify_rows(rows, slots, positions=logits_BMV.shape[1])
        return verify_rows(logits_BMV, drafts_BN, draft_logits_BNV, found, arch=self.arch)

    def draft(
        self, logits_BV: Tensor, rows: Sequence[SampleRow], depth: int, *, rejection: bool
    ) -> Tensor:
        """Enqueue the drawing of one draft a row, int64 [B]; see verification.draw_drafts."""
        drawn = self.draft_rows(rows, depth, rejection=rejection)
        return sample_rows(logits_BV, drawn, arch=self.arch)[0]

    def draft_rows(self, rows: Sequence[SampleRow], depth: int, *, rejection: bool) -> SamplingRows:
        """The parameters of drafts on the device. A chain of drafts in one graph keeps those of
        depth 0 and adds the depth to `position`."""
        found = [draft_row(row, depth, rejection=rejection) for row in rows]
        return self.rows(found, [0] * len(rows))

    def compile(self, logits_nV: Tensor) -> None:
        """Launch the drawing of a row as it is and of one whose logits are edited."""
        for params in (SamplingParams(), SamplingParams(presence_penalty=1.0)):
            row = SampleRow(params, seed=0, position=0, edits=LogitEdits(params, (), ()))
            self.sample(logits_nV[:1], [row], [0])

    def rows(self, rows: Sequence[SampleRow], slots: Sequence[int]) -> SamplingRows:
        """The parameters of a step on the device."""
        return self._rows(rows, slots, positions=1, limit=())[0]

    def verify_rows(
        self, rows: Sequence[SampleRow], slots: Sequence[int], *, positions: int
    ) -> VerifyRows:
        """The parameters of a step in which every row has `positions` tokens to be drawn, after as
        many drafts less one. A grammar masks the first, and its rows accept no draft."""
        limit = [0 if row.edits.mask is not None else positions - 1 for row in rows]
        sampling, at_most = self._rows(rows, slots, positions=positions, limit=limit)
        return VerifyRows(sampling=sampling, limit=at_most)

    def _rows(
        self,
        rows: Sequence[SampleRow],
        slots: Sequence[int],
        *,
        positions: int,
        limit: Sequence[int],
    ) -> tuple[SamplingRows, Tensor]:
        values: dict[str, list] = {
            "top_p": [r.params.top_p for r in rows],
            "seed": [signed64(r.seed) for r in rows],
            "position": [r.position for r in rows],
            "temperature": [r.params.temperature for r in rows],
            "log_min_p": [
                math.log(r.params.min_p) if r.params.min_p > 0 else -math.inf for r in rows
            ],
            "top_k": [min(r.params.top_k, self.vocabulary) for r in rows],
        }
        arrays = {name: np.repeat(np.array(values[name], dtype), positions)
                  for name, dtype in _FIELDS}  # fmt: skip
        arrays["position"] += np.tile(np.arange(positions), len(rows))
        edits: list[NDArray] = []
        if any(row.edits.active for row in rows):
            edits = self._edits(rows, slots, positions)
        put = self._put([*arrays.values(), np.array(limit, np.int32), *edits])
        tensors = dict(zip(arrays, put, strict=False))
        edited = None
        if edits:
            names = dict(zip(_EDIT_FIELDS, put[len(arrays) + 1 :], strict=True))
            edited = SamplingEdits(counts=self.counts, **names)
        return SamplingRows(**tensors, edits=edited), put[len(arrays)]

    def _edits(
        self, rows: Sequence[SampleRow], slots: Sequence[int], positions: int
    ) -> list[NDArray]:
        """SamplingEdits' _EDIT_FIELDS on the host."""
        penalties, count_row, allowed_row = [], [], []
        ids: list[NDArray] = [np.zeros(0, np.int32)]
        extra: list[NDArray] = [np.zeros(0, np.float32)]
        lengths = [0]
        masks: list[NDArray] = []
        for row, slot in zip(rows, slots, strict=True):
            p, edits = row.params, row.edits
            penalties.append((p.frequency_penalty, p.presence_penalty, p.repetition_penalty))
            count_row.append(-1 if edits.counts is None else slot)
            for j in range(positions):
                held = edits.stop_ids if edits.holds_back_stop_after(j) else edits.stop_ids[:0]
                ids += [edits.bias_ids.astype(np.int32), held.astype(np.int32)]
                extra += [edits.bias, np.full(len(held), -math.inf, np.float32)]
                lengths.append(len(edits.bias_ids) + len(held))
            allowed = None if edits.mask is None else edits.mask.allowed()
            allowed_row += [-1 if allowed is None else len(masks), *[-1] * (positions - 1)]
            if allowed is not None:
                masks.append(_packed(allowed, self.vocabulary))
        words = -(-self.vocabulary // 32)
        return [
            np.repeat(np.array(penalties, np.float32), positions, axis=0),
            np.repeat(np.array(count_row, np.int32), positions),
            np.cumsum(lengths).astype(np.int32),
            np.concatenate(ids),
            np.concatenate(extra),
            np.array(masks, np.int32).reshape(-1, words),
            np.array(allowed_row, np.int32),
        ]

    def _put(self, arrays: Sequence[NDArray]) -> list[Tensor]:
        """Arrays to the device in one copy."""
        if self.device.type == "cpu":
            return [torch.from_numpy(a) for a in arrays]
        spans = _spans([a.nbytes for a in arrays])
        # Pinned memory of torch's cache is not handed out again before the copy has read it.
        staged = torch.empty(spans[-1].stop, dtype=torch.uint8, pin_memory=True)
        flat = staged.numpy()
        for a, span in zip(arrays, spans, strict=True):
            flat[span] = a.reshape(-1).view(np.uint8)
        moved = staged.to(self.device, non_blocking=True)
        return [
            moved[span].view(torch.from_numpy(a[:0].reshape(-1)).dtype).view(a.shape)
            for a, span in zip(arrays, spans, strict=True)
        ]


def _spans(sizes: Sequence[int]) -> list[slice]:
    """Where arrays of so many bytes lie in one buffer. Each begins at a multiple of 16: Triton
    compiles a kernel again for every pattern of aligned and unaligned arguments."""
    spans, at = [], 0
    for size in sizes:
        spans.append(slice(at, at + size))
        at += -(-size // 16) * 16
    return spans


def _packed(allowed: NDArray, vocabulary: int) -> NDArray:
    """bool [V] as int32 words, token v at bit v % 32 of word v // 32."""
    padded = np.zeros(-(-vocabulary // 32) * 32, bool)
    padded[:vocabulary] = allowed[:vocabulary]
    return np.packbits(padded, bitorder="little").view(np.int32)
