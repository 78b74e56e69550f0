"""How much memory pages and rings get, and what follows from it for lengths and batch size."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from inkling_rocm.config import TextConfig
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.free_memory import GIB, free_bytes
from inkling_rocm.engine.other_memory import NOTHING, OtherMemory, other_memory
from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.rings import ConvRings, ring_channels
from inkling_rocm.host import CONV_STREAMS

logger = logging.getLogger(__name__)

CPU_LIMIT_BYTES = 4 * GIB
SNAPSHOTS_A_SEQUENCE, SNAPSHOT_SHARE = 4, 1 / 8  # the default, and the most memory it may take


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Sizes of an engine.

    Attributes:
        context_length: most tokens of prompt and output. chunk_tokens: most prompt tokens a step.
        global_pages, window_pages: the sink included; 0 where the model has no such layer.
        snapshots: ring slots of the prefix cache, beyond the others.
        slots: sequence slots, the dummy included.
        draft_depths: draft blocks that run behind the model. block_drafts: drafts a round of a
            draft model of its own. rounds_ahead: rings also cover a round that runs ahead.
        other: what was left for everything else.
    """

    context_length: int
    max_running: int
    chunk_tokens: int
    page_size: int
    global_pages: int
    window_pages: int
    draft_depths: int = 0
    block_drafts: int = 0
    snapshots: int = 0
    rounds_ahead: bool = False
    other: OtherMemory = NOTHING

    @property
    def most_drafts(self) -> int:
        """Drafts of a sequence that a step verifies."""
        return self.draft_depths + self.block_drafts

    @property
    def draft_tokens(self) -> int:
        """Positions of a sequence that may be computed again or taken back: what a round verifies,
        and what the draft blocks compute after it. A boundary of the prefix cache that a round has
        passed is copied from the rings when the next round has run too."""
        rounds = 2 if self.rounds_ahead else 1
        return self.most_drafts + rounds * self.draft_depths

    @property
    def slots(self) -> int:
        return self.max_running + 1


def plan_memory(
    text: TextConfig,
    args: EngineArgs,
    *,
    dtype: torch.dtype,
    device: torch.device,
    free: int | None = None,
    draft_depths: int = 0,
    block_drafts: int = 0,
    block_token_bytes: int = 0,
) -> MemoryPlan:
    """Divide the memory between rings, window pages and global pages.

    Args:   text: as one rank sees it, draft_depths draft blocks included (text_with_drafts).
            free: bytes; None = what the device has.
            block_drafts: drafts a round of a draft model of its own, which keeps block_token_bytes
            for each token of the global pages.

    Raises: ValueError: nothing useful fits, or context_length cannot be had.
    """
    cpu = device.type == "cpu"
    context = args.context_length or text.context_length
    if context > text.context_length:
        raise ValueError(
            f"context_length {context}: the model was made for at most {text.context_length}"
        )
    max_running = args.max_running_requests or (32 if cpu else 256)
    chunk = args.chunked_prefill_size or (512 if cpu else 8192)
    # Prompts share a step, so that it may hold more than one has.
    chunk = context if chunk == -1 else min(chunk, context * max_running)
    share = args.mem_fraction_static or (0.2 if cpu else 0.85)
    free = free_bytes(device) if free is None else free
    other = other_memory(
        text,
        args,
        chunk=chunk,
        max_running=max_running,
        dtype=dtype,
        device=device,
        draft_depths=draft_depths,
        block_drafts=block_drafts,
    )
    budget = int(free * share)
    if cpu and args.mem_fraction_static is None:
        budget = min(budget, CPU_LIMIT_BYTES)
    budget = max(min(budget - other.kept, free - other.total), 0)

    page, size = args.page_size, dtype.itemsize
    rounds_ahead = not (args.disable_overlap_schedule or args.disable_radix_cache)
    draft_rows = (3 if rounds_ahead else 2) * draft_depths + block_drafts
    page_bytes = _page_bytes(text, page, size)
    page_bytes[False] += page * block_token_bytes
    slot_bytes = _ring_bytes(text, draft_rows, size) + 2 * draft_depths * text.hidden_size * size
    # Every sequence's window, the new pages of one prompt chunk, and a page more for each.
    window = text.local_attention.window
    a_sequence = min(max(window - 2 + draft_depths, 0) // page + 2, -(-context // page))
    window_pages = max_running * (a_sequence + 1) + -(-chunk // page) + 1
    # A prefix that is kept needs its rings and a window too, some of it shared with others.
    kept_bytes = slot_bytes + a_sequence * page_bytes[True]
    snapshots = args.prefix_snapshots or min(
        SNAPSHOTS_A_SEQUENCE * max_running, int(budget * SNAPSHOT_SHARE) // kept_bytes
    )
    snapshots = 0 if args.disable_radix_cache else snapshots
    window_pages += snapshots * a_sequence
    ring_bytes = slot_bytes * (max_running + 1 + snapshots)
    left = max(budget - ring_bytes, 0)
    if page_bytes[True]:
        most = left // (2 if page_bytes[False] else 1) // page_bytes[True]
        window_pages = min(window_pages, most)
        left -= window_pages * page_bytes[True]
    else:
        window_pages = 0
    useful = max_running * -(-context // page) + 1
    if args.max_total_tokens is not None:
        global_pages = -(-args.max_total_tokens // page) + 1
    elif page_bytes[False]:
        global_pages = min(useful, left // page_bytes[False])
    else:
        global_pages = useful
    if page_bytes[True]:
        window_pages = min(window_pages, global_pages)
    if global_pages < 2 or (page_bytes[True] and window_pages <= min(a_sequence, global_pages - 1)):
        raise ValueError(
            f"{budget / GIB:.2f} GiB for pages and rings do not hold one sequence "
            f"({global_pages} global pages, {window_pages} window pages, rings "
            f"{ring_bytes / GIB:.2f} GiB; {free / GIB:.2f} GiB are free, beside them: {other}); "
            "raise mem_fraction_static or max_total_tokens, or lower max_running_requests or "
            f"{'prefix_snapshots or ' if args.prefix_snapshots else ''}chunked_prefill_size"
        )
    held = (global_pages - 1) * page
    if context > held:
        if args.context_length is not None:
            raise ValueError(
                f"context_length {context}: the page pool holds {held} tokens; raise "
                "max_total_tokens or mem_fraction_static"
            )
        context = held
    chunk = min(chunk, held)
    if (args.chunked_prefill_size or 0) > chunk:
        logger.warning(
            "chunked_prefill_size %d is more than %d requests of at most %d tokens, or the page "
            "pool of %d, can fill: a step computes at most %d prompt tokens",
            args.chunked_prefill_size,
            max_running,
            context,
            held,
            chunk,
        )
    if not page_bytes[False]:
        global_pages = 0
    total = (ring_bytes + global_pages * page_bytes[False] + window_pages * page_bytes[True]) / GIB
    if total + other.total / GIB > free / GIB:
        raise ValueError(
            f"pages and rings of {total:.2f} GiB were asked for, but only {free / GIB:.2f} GiB are "
            f"free (beside them: {other}); lower max_total_tokens or max_running_requests"
        )
    logger.info(
        "pools: %d global and %d window pages of %d tokens, %d sequence slots, %d prefix "
        "snapshots, %.3f GiB; context %d (checkpoint: %d), prompt chunk %d",
        global_pages,
        window_pages,
        page,
        max_running,
        snapshots,
        total,
        context,
        text.context_length,
        chunk,
    )
    logger.info(
        "memory: %.2f GiB are free; beside pools: %s; %.2f GiB stay",
        free / GIB,
        other,
        (free - other.total) / GIB - total,
    )
    return MemoryPlan(
        context_length=context,
        max_running=max_running,
        chunk_tokens=chunk,
        page_size=page,
        global_pages=global_pages,
        window_pages=window_pages,
        draft_depths=draft_depths,
        block_drafts=block_drafts,
        snapshots=snapshots,
        rounds_ahead=rounds_ahead,
        other=other,
    )


def _page_bytes(text: TextConfig, page_size: int, itemsize: int) -> dict[bool, int]:
    """A page of all layers that share a pool, by layer_is_local."""
    found = {True: 0, False: 0}
    for layer, is_local in enumerate(text.layer_is_local):
        attention = text.attention(layer)
        found[is_local] += 2 * page_size * attention.num_kv_heads * attention.head_dim * itemsize
    return found


def _ring_bytes(text: TextConfig, draft_tokens: int, itemsize: int) -> int:
    """The rings of one slot."""
    layers = range(text.num_layers)
    channels = sum(ring_channels(text, layer, s) for layer in layers for s in CONV_STREAMS)
    return max(text.conv_taps - 1 + draft_tokens, 1) * channels * itemsize


def build_pools(
    text: TextConfig, plan: MemoryPlan, *, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[PagePool, ...], ConvRings]:
    """Allocate what was planned. Layers of one pool have one K/V shape."""
    pools = []
    for is_local, pages in ((False, plan.global_pages), (True, plan.window_pages)):
        if not pages:
            continue
        attention = text.local_attention if is_local else text.global_attention
        flags = enumerate(text.layer_is_local)
        pools.append(
            PagePool(
                layers=tuple(layer for layer, local in flags if local == is_local),
                window=attention.window,
                pages=pages,
                page_size=plan.page_size,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                slots=plan.slots,
                context_length=plan.context_length,
                dtype=dtype,
                device=device,
                lag=plan.draft_depths,
            )
        )
    rings = ConvRings(
        text,
        slots=plan.slots,
        dtype=dtype,
        device=device,
        draft_tokens=plan.draft_tokens,
        snapshots=plan.snapshots,
    )
    return tuple(pools), rings
