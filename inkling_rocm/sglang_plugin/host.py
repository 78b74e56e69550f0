"""SGLang's ForwardBatch as our host: BatchMeta, K/V pages and convolution rings of one step.

SGLang's conventions end here. seq_lens counts the current tokens in decode and extend; slots are
taken from SGLang, never derived; slot 0 is the sink of every pool; entries of the window's page
table below the window are 0 because those pages have been freed. Convolution state is a ring of
R = W - 1 rows on SGLang's own pool, so whatever copies whole slots (prefix donors, snapshots,
host caches) carries it along.

An eager step is laid out by `prepare`. A decode graph has one layout for each batch size over
buffers that stay (`bind`), and its first launch fills them from SGLang's (`derive`): a replay needs
nothing from the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.config import TextConfig
from inkling_rocm.host import (
    BatchMeta,
    Comm,
    ConvStateView,
    ConvStream,
    KVCacheView,
)
from inkling_rocm.host.token_table import TokenTable, TokenTableOutputs, token_table_reference

# Index of a stream in SGLang's pool, for global and for window layers.
STREAM_INDEX = {
    "k": {False: 0, True: 2},
    "v": {False: 1, True: 3},
    "attn": {False: 4, True: 4},
    "mlp": {False: 5, True: 5},
}


class SGLangHost:
    """Host of the step that was last prepared.

    Args: runner: SGLang's ModelRunner with our model loaded and its pools made.
    """

    meta: BatchMeta
    comm: Comm

    def __init__(self, runner):
        self._requests = runner.req_to_token_pool
        self._pages = runner.token_to_kv_pool
        self._page_size: int = runner.page_size
        self._kv_group: dict[bool, dict[str, Any]] = {}
        self._ring: dict[str, Any] = {}
        self._text: TextConfig = runner.model.inkling.text
        self._buffers: TokenTableOutputs | None = None
        self.comm = runner.model.comm
        self._capture_routing = runner.model.capture_routing

    def prepare(self, batch) -> None:
        """Lay out one forward of SGLang's batch.

        Raises: RuntimeError: a kind of forward that is not supported.
        """
        mode = batch.forward_mode
        if mode.is_idle() or batch.batch_size == 0:
            return
        rows = batch.batch_size
        kv_len = batch.seq_lens[:rows].to(torch.int32)
        if mode.is_decode():
            q_len = torch.ones_like(kv_len)
            lengths = [1] * rows
        elif mode.is_extend() and not mode.is_target_verify() and not mode.is_draft_extend_v2():
            q_len = batch.extend_seq_lens[:rows].to(torch.int32)
            lengths = list(batch.extend_seq_lens_cpu)[:rows]
        else:
            raise RuntimeError(f"forward mode {mode.name} is not supported by this plugin yet")
        tokens = sum(lengths)
        q_start = kv_len - q_len
        cu_seqlens = F.pad(torch.cumsum(q_len, 0, dtype=torch.int32), (1, 0))
        device = kv_len.device
        token_row = torch.repeat_interleave(
            torch.arange(rows, dtype=torch.int32, device=device), q_len.long(), output_size=tokens
        )
        uniform = len(set(lengths)) == 1
        max_kv = int(batch.seq_lens_cpu[:rows].max())
        self.meta = BatchMeta(
            kind="decode" if mode.is_decode() else "prefill",
            num_rows=rows,
            num_tokens=tokens,
            q_uniform=lengths[0] if uniform else 0,
            max_q=max(lengths),
            max_kv=max_kv,
            positions=batch.positions[:tokens].to(torch.int32),
            cu_seqlens_q=cu_seqlens,
            q_start=q_start,
            kv_len=kv_len,
            token_row=token_row,
        )
        slots = batch.out_cache_loc[:tokens].long()
        requests = batch.req_pool_indices[:rows].long()
        page = self._page_size
        starts = self._requests.req_to_token[requests, :max_kv:page].long()
        first_page = torch.zeros(rows, dtype=torch.int32, device=device)
        in_window = self._pages.full_to_swa_index_mapping[starts]
        self._kv_group = self._groups(
            (starts // page).to(torch.int32),
            first_page,
            slots,
            (in_window // page).to(torch.int32),
            first_page,
            self._pages.translate_loc_from_full_to_swa(slots).long(),
        )
        history = torch.clamp(q_start, max=self._text.conv_taps - 1)
        self._ring = {
            "slot": self._requests.get_mamba_indices(requests).to(torch.int32),
            "token_slot": slots,
            "history": history,
            **self._snapshots(batch, q_start, kv_len),
        }

    def allocate(self, max_rows: int) -> None:
        """Make the buffers of decode graphs."""
        tokens = self._requests.req_to_token
        self._buffers = TokenTableOutputs.allocate(
            max_rows,
            tokens.shape[1],
            page_size=self._page_size,
            window=self._text.local_attention.window,
            device=tokens.device,
        )
        self._counting = torch.arange(max_rows + 1, dtype=torch.int32, device=tokens.device)

    def bind(self, batch) -> None:
        """Lay out a decode graph of batch.batch_size rows.

        Raises: RuntimeError: another kind of graph.
        """
        mode, rows = batch.forward_mode, batch.batch_size
        if not mode.is_decode():
            raise RuntimeError(
                f"forward mode {mode.name} cannot be captured with this plugin; start SGLang with "
                "--disable-prefill-cuda-graph"
            )
        assert self._buffers is not None, "SGLang captures before init_cuda_graph_state"
        out = self._buffers.first_rows(rows)
        self.meta = BatchMeta(
            kind="decode",
            num_rows=rows,
            num_tokens=rows,
            q_uniform=1,
            max_q=1,
            max_kv=self._requests.req_to_token.shape[1],
            positions=out.q_start,
            cu_seqlens_q=self._counting[: rows + 1],
            q_start=out.q_start,
            kv_len=out.kv_len,
            token_row=self._counting[:rows],
        )
        self._kv_group = self._groups(
            out.pages,
            torch.zeros_like(out.window_first),
            out.write,
            out.window_pages,
            out.window_first,
            out.window_write,
        )
        tracked = batch.mamba_track_mask is not None
        self._ring = {
            "slot": out.ring,
            "token_slot": out.write,
            "history": out.history,
            "snapshot_slot": out.snapshot if tracked else None,
            "snapshot_position": out.kv_len if tracked else None,
        }

    def derive(self, batch) -> None:
        """Fill the layout made by `bind` from the batch's tensors: enqueues only."""
        assert self._buffers is not None
        inputs = TokenTable(
            lengths=batch.seq_lens,
            requests=batch.req_pool_indices,
            slots=batch.out_cache_loc,
            token_slots=self._requests.req_to_token,
            window_slots=self._pages.full_to_swa_index_mapping,
            ring_of_request=self._requests.req_index_to_mamba_index_mapping,
            track=batch.mamba_track_mask,
            track_slots=batch.mamba_track_indices,
        )
        out = self._buffers.first_rows(batch.batch_size)
        window, taps = self._text.local_attention.window, self._text.conv_taps
        fill = _token_table(inputs.lengths.device)
        fill(inputs, out, page_size=self._page_size, window=window, taps=taps)
        self.meta = replace(self.meta, memo={})

    def kv(self, layer: int) -> KVCacheView:
        # Waits for the layer when SGLang is still bringing it back from host memory.
        k, v = self._pages.get_kv_buffer(layer)
        page = self._page_size
        return KVCacheView(
            k=k.view(-1, page, *k.shape[1:]),
            v=v.view(-1, page, *v.shape[1:]),
            **self._kv_group[self._text.layer_is_local[layer]],
        )

    def conv(self, layer: int, stream: ConvStream) -> ConvStateView:
        index = STREAM_INDEX[stream][self._text.layer_is_local[layer]]
        pool_layer = self._requests.mamba2_layer_index(layer)
        state = self._requests.mamba_pool.mamba_cache.conv[index][pool_layer]
        return ConvStateView(state=state, **self._ring)

    def capture_routing(self, layer: int, topk_ids: Tensor) -> None:
        self._capture_routing(layer, topk_ids)

    def _groups(
        self,
        pages: Tensor,
        first_page: Tensor,
        write: Tensor,
        window_pages: Tensor,
        window_first: Tensor,
        window_write: Tensor,
    ) -> dict[bool, dict[str, Any]]:
        """What the views of global (False) and window (True) layers have in common."""
        window = self._text.local_attention.window
        groups = (
            (pages, first_page, write, 0),
            (window_pages, window_first, window_write, window),
        )
        return {
            visible > 0: {
                "page_size": self._page_size,
                "page_table": table,
                "first_page": first,
                "slot": slot,
                "window": visible,
            }
            for table, first, slot, visible in groups
        }

    def _snapshots(self, batch, q_start: Tensor, kv_len: Tensor) -> dict[str, Tensor]:
        """Where the prefix cache wants this step's state: decode at the new length, extend at the
        last whole chunk past the request's own prefix."""
        mask, slots = batch.mamba_track_mask, batch.mamba_track_indices
        if mask is None or slots is None:
            return {}
        rows = kv_len.shape[0]
        boundary = kv_len
        if not batch.forward_mode.is_decode():
            from sglang.srt.runtime_context import mamba_cache_chunk_size

            chunk = mamba_cache_chunk_size()
            wanted = batch.mamba_track_seqlens[:rows].to(torch.int32)
            boundary = q_start + (wanted - q_start) // chunk * chunk
        slots = torch.where(mask[:rows], slots[:rows], 0).to(torch.int32)
        return {"snapshot_slot": slots, "snapshot_position": boundary.to(torch.int32)}


def _token_table(device: torch.device):
    """What fills a graph's layout there; Triton is imported only where it runs."""
    if device.type == "cpu":
        return token_table_reference
    from inkling_rocm.kernels.token_table import token_table

    return token_table
