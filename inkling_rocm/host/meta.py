"""What one forward gets from whoever runs it: token layout, K/V pages, convolution rings.

Shape letters: T tokens of the forward (padded), B request rows (padded), g kv heads of this rank, D
head_dim, R ring rows, C channels, W convolution taps. Positions are absolute. Slot 0 is the sink
everywhere: a token whose slot is 0 changes no state; its output is ignored but must be finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

ForwardKind = Literal["prefill", "decode", "verify", "draft"]
ConvStream = Literal["k", "v", "attn", "mlp"]
CONV_STREAMS: tuple[ConvStream, ...] = ("k", "v", "attn", "mlp")


@dataclass(frozen=True, kw_only=True)
class BatchMeta:
    """Token layout of one forward; every tensor keeps its address within a graph bucket.

    Attributes:
        kind: a launch hint; the mathematics never depends on it.
        num_rows, num_tokens: B and T, padding included.
        q_uniform: tokens of every row (1 decode, N verify), or 0 for ragged rows.
        max_q, max_kv: host upper bounds of row lengths; kernels use device lengths only.
        positions: int32 [T], absolute position of each token.
        cu_seqlens_q: int32 [B+1], row b owns tokens cu_seqlens_q[b] .. cu_seqlens_q[b+1]-1; rows
            may be empty.
        q_start: int32 [B], absolute position of the row's first token.
        kv_len: int32 [B] = q_start + q_len: keys visible to the row's last token.
        token_row: int32 [T], row of each token.
        memo: index tensors that torch reference ops derive once and reuse in every layer of this
            forward, by what they describe.
    """

    kind: ForwardKind
    num_rows: int
    num_tokens: int
    q_uniform: int
    max_q: int
    max_kv: int
    positions: Tensor
    cu_seqlens_q: Tensor
    q_start: Tensor
    kv_len: Tensor
    token_row: Tensor
    memo: dict[tuple, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class KVCacheView:
    """K/V pages of one layer.

    Attributes:
        k, v: [pages, page_size, g, D], inner two dims contiguous. Page 0 is the sink.
        page_table: int32 [B, P]; row b covers the pages of positions first_page[b] * page_size and
            up.
        first_page: int32 [B]; zeros where nothing has been freed. Entries before the window may be
            freed: never read keys below q_start - (window - 1).
        slot: int64 [T], flat write slot page * page_size + offset; 0 = no side effects for this
            token.
        window: visible keys including the current one; 0 = all.
    """

    k: Tensor
    v: Tensor
    page_size: int
    page_table: Tensor
    first_page: Tensor
    slot: Tensor
    window: int


@dataclass(frozen=True, kw_only=True)
class ConvStateView:
    """Ring of one short convolution: `state[slot, p % R]` is the RAW input at absolute position p.

    Attributes:
        state: [slots, R, C], model dtype, C contiguous.
        slot: int32 [B], 0 = dummy.
        token_slot: int64 [T], the K/V write slot of each token: 0 = do not touch the ring for this
            token.
        history: int32 [B], usable rows before q_start: min(q_start, W-1), or 0 to run fresh.
        snapshot_slot: int32 [B], <= 0 = none; snapshot_position: int32 [B], boundary P: rows
            P-(W-1) .. P-1 are copied to the same ring rows of snapshot_slot once they are known.
    """

    state: Tensor
    slot: Tensor
    token_slot: Tensor
    history: Tensor
    snapshot_slot: Tensor | None = None
    snapshot_position: Tensor | None = None


class Comm(Protocol):
    """The tensor-parallel group of one rank."""

    tp_rank: int
    tp_size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; may reuse x's memory."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors along dim."""
        ...


class SingleRank:
    """The group of one: every collective is the identity."""

    tp_rank = 0
    tp_size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x


class Host(Protocol):
    """What the model asks of its host during one forward."""

    meta: BatchMeta
    comm: Comm

    def kv(self, layer: int) -> KVCacheView:
        """K/V pages of a layer. May wait for a cache load: call once per layer and forward, before
        the first read."""
        ...

    def conv(self, layer: int, stream: ConvStream) -> ConvStateView:
        """The ring of one of a layer's four short convolutions."""
        ...

    def capture_routing(self, layer: int, topk_ids: Tensor) -> None:
        """Routed expert ids of a MoE layer, int32 [T, K], for routing replay."""
        ...
