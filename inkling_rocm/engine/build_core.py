"""From a loaded model to the core of an engine, on rank 0 where there are several."""

from __future__ import annotations

from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.buckets import decode_buckets
from inkling_rocm.engine.build import build_executor, plan_engine
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.engine.executor import Executor
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.memory import MemoryPlan
from inkling_rocm.engine.metrics import EngineMetrics
from inkling_rocm.engine.prefix_cache.open_tiers import open_tiers
from inkling_rocm.engine.ranks import Ranks
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.speculative.adaptive import AdaptiveSteps
from inkling_rocm.engine.speculative.stats import SpeculationStats
from inkling_rocm.engine.tensor_parallel import TensorParallelExecutor
from inkling_rocm.host import SingleRank
from inkling_rocm.host.comm import RankSlice


def build_core(
    parts: EngineParts, args: EngineArgs, metrics: EngineMetrics, ranks: Ranks | None
) -> tuple[EngineCore, MemoryPlan]:
    """Pools, executor, scheduler, prefix cache and speculation.

    Args:   ranks: the other ranks, which are waited for; None = this one is alone.
    Raises: ValueError: the memory does not suffice. RankLost: a rank has ended.
    """
    if ranks is None:
        plan = plan_engine(parts, args)
        comm = SingleRank() if args.rank_slice is None else RankSlice(args.rank_slice)
        local = build_executor(parts, args, plan, comm)
        executor: Executor = local
    else:
        plan, local = ranks.join(parts)
        executor = TensorParallelExecutor(local, ranks)
    scheduler = Scheduler(
        local.host.pools,
        local.host.rings,
        chunk_tokens=plan.chunk_tokens,
        max_running=plan.max_running,
        depths=plan.draft_depths,
        most_drafts=plan.most_drafts,
    )
    open_tiers(scheduler.cache, parts, args)
    speculation = None
    if plan.most_drafts:
        adaptive = None
        if args.speculative_adaptive:
            buckets = decode_buckets(plan.max_running)
            adaptive = AdaptiveSteps(plan.most_drafts, buckets=buckets)
        speculation = SpeculationStats(plan.most_drafts, metrics, adaptive)
    return EngineCore(executor, scheduler, metrics, speculation), plan
