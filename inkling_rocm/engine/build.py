"""From a model and a memory plan to what runs its steps: the same for every rank."""

from __future__ import annotations

from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.gpu import (
    make_decode_runner,
    make_prefill_runner,
    make_round_runner,
    make_sampler,
)
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.local_executor import LocalExecutor
from inkling_rocm.engine.memory import MemoryPlan, build_pools, plan_memory
from inkling_rocm.engine.speculative.dflash import DFlashDrafter
from inkling_rocm.engine.speculative.drafter import Drafter
from inkling_rocm.engine.speculative.mtp import MTPDrafter
from inkling_rocm.engine.speculative.options import block_drafts
from inkling_rocm.engine.speculative.round import Speculation
from inkling_rocm.engine.token_sampler import TokenSampler
from inkling_rocm.host import Comm
from inkling_rocm.model.layer import rank_text
from inkling_rocm.model.mtp import text_with_drafts


def plan_engine(parts: EngineParts, args: EngineArgs, *, free: int | None = None) -> MemoryPlan:
    """Divide the memory between what the model and its draft need.

    Args:   free: bytes; None = what the device has.
    Raises: ValueError: see plan_memory.
    """
    depths = 0 if parts.drafts is None else parts.drafts.depths
    block: dict[str, int] = {}
    if parts.block_draft is not None:
        draft = parts.block_draft.config
        block = {
            "block_drafts": block_drafts(args, draft),
            "block_token_bytes": draft.kv_bytes(parts.dtype.itemsize),
        }
    return plan_memory(
        rank_text(text_with_drafts(parts.config, depths), args.ranks),
        args,
        dtype=parts.dtype,
        device=parts.device,
        free=free,
        draft_depths=depths,
        **block,
    )


def build_executor(
    parts: EngineParts,
    args: EngineArgs,
    plan: MemoryPlan,
    comm: Comm,
    sampler: TokenSampler | None = None,
) -> LocalExecutor:
    """Pools, rings, host and executor of one rank.

    Args:   plan: the same on every rank. sampler: None = this rank draws for itself.
    """
    text = parts.config.text
    depths = plan.draft_depths
    of_rank = rank_text(text_with_drafts(parts.config, depths), comm.tp_size)
    pools, rings = build_pools(of_rank, plan, dtype=parts.dtype, device=parts.device)
    host = EmbeddedHost(
        of_rank,
        pools,
        rings,
        max_tokens=plan.chunk_tokens + plan.max_running * (1 + plan.draft_tokens),
        max_rows=plan.max_running,
        device=parts.device,
        comm=comm,
        check=args.check_invariants,
    )
    on_gpu = parts.device.type != "cpu"
    sampler = sampler or make_sampler(parts, plan)
    speculation = None
    rejection = args.speculative_use_rejection_sampling
    drafter: Drafter | None = None
    if parts.drafts is not None:
        drafter = MTPDrafter(parts.drafts, host, sampler, keep_logits=rejection)
    elif parts.block_draft is not None:
        drafter = DFlashDrafter(
            parts.block_draft,
            parts.model,
            host,
            sampler,
            drafts=plan.block_drafts,
            keep_logits=rejection,
        )
    if drafter is not None:
        speculation = Speculation(
            drafter,
            sampler,
            rejection=rejection,
            simulated=args.speculative_simulate_acceptance,
        )
    rounds = None
    if isinstance(drafter, MTPDrafter):
        assert speculation is not None
        draws = sampler.for_rounds(rejection=rejection)
        rounds = make_round_runner(
            parts, args, plan, host, drafter, sampler, draws, speculation.simulated
        )
    decode = None if speculation else make_decode_runner(parts, args, plan, host, sampler)
    prefill = None if decode is None else make_prefill_runner(parts, args, plan, host)
    return LocalExecutor(
        parts.model,
        host,
        sampler,
        vocabulary=text.unpadded_vocab_size,
        runs_ahead=on_gpu and not args.disable_overlap_schedule,
        decode=decode,
        prefill=prefill,
        speculation=speculation,
        rounds=rounds,
    )
