"""The engine's arguments, by SGLang's names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from inkling_rocm.engine.speculative.options import check_speculative

PAGE_SIZES = (1, 16, 64, 128)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """How to load and run a model.

    Attributes:
        model_path: a checkpoint folder, or "demo" for the generated one.
        tokenizer_path: only the built-in o200k tokenizer exists; None.
        device: "cpu", "cuda", ...; None = a GPU if torch sees one, else the CPU.
        dtype: "auto" = the checkpoint's on a GPU, float32 on a CPU; or "bfloat16", "float16",
            "float32".
        load_format: "auto" reads the checkpoint, "dummy" makes random weights.
        skip_tokenizer_init: run on token ids only: no text, no stop strings, no constraints.
        context_length: most tokens of prompt and output together; None = what the checkpoint says,
            cut to what the page pools hold.
        page_size: tokens of a K/V page: 1, 16, 64 or 128.
        chunked_prefill_size: most prompt tokens in one forward, of one prompt or of several; -1 =
            context_length, so that no prompt is cut; None = 512 on a CPU, 8192 on a GPU. Decoding
            sequences add one token each on top.
        max_running_requests: sequences in one batch; None = 32 on a CPU, 256 on a GPU.
        max_queued_requests: requests that may wait before new ones are refused.
        max_total_tokens: tokens the global page pool holds; None = from mem_fraction_static.
        mem_fraction_static: share of the free memory, after the weights are loaded, that pools and
            rings may take; None = 0.2 on a CPU (at most 4 GiB), 0.85 on a GPU.
        attention_backend, moe_runner_backend: "auto", or the variant to force.
        disable_cuda_graph: run every step kernel by kernel, prompt steps too.
        cuda_graph_max_bs: largest decode batch that gets a graph; None = max_running_requests.
        cuda_graph_bs: the batch sizes that get one, instead of the usual ones up to the largest.
        cuda_graph_max_bs_prefill: most tokens of a prompt step that runs from a graph; None = 1024,
            where any step does. disable_prefill_cuda_graph: run every prompt step kernel by kernel,
            as with speculation.
        disable_radix_cache: compute every prompt whole, see docs/prefix_cache.md.
        prefix_snapshots: prefixes that can be kept for reuse; None = four for each of
            max_running_requests, as far as an eighth of the memory for pools and rings goes.
        enable_hierarchical_cache: put what the prefix cache gives up into host memory and bring it
            back when it is wanted. hicache_size: GB of it; None = twice what the device holds.
        hicache_storage_backend: "file" = a third tier in the folder hicache_storage_dir, of at most
            hicache_storage_size GB; None = 100.
        disable_overlap_schedule: wait for the tokens of a step before the next one is scheduled.
        speculative_algorithm: "EAGLE" drafts with the checkpoint's own blocks, "DFLASH" with a
            draft model of its own that fills a block in one forward; None = one token a forward.
        speculative_draft_model_path: DFLASH's draft: its folder, or "demo" for a random one.
        speculative_num_steps: drafts of a round, one draft block each; None = 3, or as many blocks
            as there are if fewer. speculative_num_draft_tokens: one more than that, or None; for
            DFLASH the block's length, at most the draft's block_size;
            speculative_eagle_topk: 1 or None (drafts are a chain).
        speculative_use_rejection_sampling: accept drafts of random requests by rejection sampling:
            the same distribution, more accepted, other tokens than without speculation.
        speculative_adaptive: choose the drafts of each round, speculative_num_steps at most, by
            what gives the most tokens per second.
        speculative_simulate_acceptance: accept each draft with this probability where those before
            it were accepted, for measuring: OUTPUTS ARE MEANINGLESS. None = off.
        random_seed: from which seeds of requests without one are drawn, and dummy weights.
        served_model_name: None = model_path.
        tp_size: tensor-parallel ranks, one process and one device each.
        ep_size: ranks that hold whole routed experts: 1 (every expert is split by its width), or
            tp_size.
        rank_slice: run one rank of a tensor-parallel group of this size alone, for measuring:
            OUTPUTS ARE MEANINGLESS. None = off.
        dist_timeout: seconds that ranks wait for each other when starting, and in a collective on
            a CPU.
        json_model_override_args: a JSON object that replaces values of config.json, as
            '{"num_hidden_layers": 8}'.
        check_invariants: assert the host invariants on every step.
    """

    model_path: str
    tokenizer_path: str | None = None
    device: str | None = None
    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    skip_tokenizer_init: bool = False
    context_length: int | None = None
    page_size: int = 64
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int = 1024
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    attention_backend: str = "auto"
    moe_runner_backend: str = "auto"
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    cuda_graph_bs: tuple[int, ...] | None = None
    cuda_graph_max_bs_prefill: int | None = None
    disable_prefill_cuda_graph: bool = False
    disable_radix_cache: bool = False
    prefix_snapshots: int | None = None
    enable_hierarchical_cache: bool = False
    hicache_size: float | None = None
    hicache_storage_backend: str | None = None
    hicache_storage_dir: str | None = None
    hicache_storage_size: float | None = None
    disable_overlap_schedule: bool = False
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_use_rejection_sampling: bool = False
    speculative_adaptive: bool = False
    speculative_simulate_acceptance: float | None = None
    random_seed: int = 0
    served_model_name: str | None = None
    tp_size: int = 1
    ep_size: int = 1
    rank_slice: int | None = None
    dist_timeout: int = 300
    json_model_override_args: str = "{}"
    check_invariants: bool = False

    def __post_init__(self):
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size {self.page_size}: choose from {PAGE_SIZES}")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f'load_format {self.load_format!r}: choose from "auto", "dummy"')
        if self.tokenizer_path not in (None, self.model_path):
            raise ValueError(
                f"tokenizer_path {self.tokenizer_path!r}: only the model's own o200k tokenizer is "
                "supported; leave it out"
            )
        if self.chunked_prefill_size is not None and (
            self.chunked_prefill_size < 1 and self.chunked_prefill_size != -1
        ):
            raise ValueError(
                f"chunked_prefill_size {self.chunked_prefill_size}: wanted -1 (no limit) or at "
                "least 1"
            )
        if self.cuda_graph_bs is not None:
            object.__setattr__(self, "cuda_graph_bs", tuple(sorted(set(self.cuda_graph_bs))))
            if not self.cuda_graph_bs or self.cuda_graph_bs[0] < 1:
                raise ValueError(
                    f"cuda_graph_bs {self.cuda_graph_bs}: wanted batch sizes from 1 on"
                )
        for name in (
            "context_length", "max_running_requests", "max_total_tokens", "cuda_graph_max_bs",
            "cuda_graph_max_bs_prefill", "prefix_snapshots",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: wanted at least 1")
        check_prefix_cache(self)
        check_prompt_graphs(self)
        if self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests {self.max_queued_requests}: wanted at least 0")
        if self.tp_size < 1 or (self.rank_slice is not None and self.rank_slice < 1):
            raise ValueError(
                f"tp_size {self.tp_size}, rank_slice {self.rank_slice}: wanted at least 1"
            )
        if self.rank_slice is not None and self.tp_size != 1:
            raise ValueError(
                f"rank_slice {self.rank_slice} measures one rank alone; leave out tp_size "
                f"{self.tp_size}"
            )
        if self.ep_size not in (1, self.ranks):
            raise ValueError(
                f"ep_size {self.ep_size}: wanted 1 or the tensor parallel size {self.ranks}"
            )
        if self.dist_timeout < 1:
            raise ValueError(f"dist_timeout {self.dist_timeout}: wanted at least 1 second")
        check_speculative(self)
        share = self.mem_fraction_static
        if share is not None and not 0 < share < 1:
            raise ValueError(f"mem_fraction_static {share}: wanted a value between 0 and 1")

    @property
    def meaningless(self) -> str | None:
        """Why outputs mean nothing, where an argument is for measuring only."""
        if self.rank_slice is not None:
            return f"one rank of {self.rank_slice} alone (rank_slice)"
        if self.speculative_simulate_acceptance is not None:
            return "simulated acceptance (speculative_simulate_acceptance)"
        return None

    @property
    def ranks(self) -> int:
        """Ranks that the weights are cut for."""
        return self.rank_slice or self.tp_size


def check_prompt_graphs(args: EngineArgs) -> None:
    """Raises: ValueError: a size of prompt graphs where there are none."""
    if args.cuda_graph_max_bs_prefill is None:
        return
    for name in ("disable_cuda_graph", "disable_prefill_cuda_graph", "speculative_algorithm"):
        if value := getattr(args, name):
            raise ValueError(
                f"cuda_graph_max_bs_prefill {args.cuda_graph_max_bs_prefill}: no prompt step has a "
                f"graph with {name} {value}; leave one of them out"
            )


def check_prefix_cache(args: EngineArgs) -> None:
    """Raises: ValueError: arguments of the prefix cache and its tiers that exclude each other."""
    if args.disable_radix_cache:
        for name in ("prefix_snapshots", "enable_hierarchical_cache"):
            if value := getattr(args, name):
                raise ValueError(f"{name} {value}: leave it out with disable_radix_cache")
    if not args.enable_hierarchical_cache:
        names = ("size", "storage_backend", "storage_dir", "storage_size")
        for name in (f"hicache_{name}" for name in names):
            if (value := getattr(args, name)) is not None:
                raise ValueError(f"{name} {value!r}: wanted only with enable_hierarchical_cache")
        return
    if args.ranks > 1:
        raise ValueError(
            f"enable_hierarchical_cache: {args.ranks} ranks would have to agree on every entry, "
            "which is not built; leave out tp_size, or the tiers"
        )
    if args.hicache_storage_backend not in (None, "file"):
        raise ValueError(
            f'hicache_storage_backend {args.hicache_storage_backend!r}: only "file" is built in'
        )
    if (args.hicache_storage_backend is None) != (args.hicache_storage_dir is None):
        raise ValueError(
            f"hicache_storage_backend {args.hicache_storage_backend!r} and hicache_storage_dir "
            f"{args.hicache_storage_dir!r}: wanted both or neither"
        )
    if args.hicache_storage_size is not None and args.hicache_storage_dir is None:
        raise ValueError(
            f"hicache_storage_size {args.hicache_storage_size}: wanted only with "
            "hicache_storage_dir"
        )
    for name in ("hicache_size", "hicache_storage_size"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} {value}: wanted more than 0 GB")
