"""What `--speculative-*` may say, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inkling_rocm.config import InklingConfig

if TYPE_CHECKING:
    from inkling_rocm.engine.args import EngineArgs

# Without --speculative-num-steps. A guess: deep chains cost throughput, shallow ones latency.
DEFAULT_STEPS = 3
ALGORITHMS = ("EAGLE",)


def check_speculative(args: EngineArgs) -> None:
    """Raises: ValueError: arguments that contradict each other or ask for what does not exist."""
    if args.speculative_algorithm is None:
        given = [
            name
            for name in (
                "num_steps",
                "num_draft_tokens",
                "use_rejection_sampling",
                "adaptive",
                "simulate_acceptance",
            )
            if getattr(args, f"speculative_{name}") not in (None, False)
        ]
        if given:
            raise ValueError(
                f"speculative_{given[0]} means nothing without speculative_algorithm; choose from "
                f"{', '.join(ALGORITHMS)}"
            )
        return
    if args.speculative_algorithm not in ALGORITHMS:
        raise ValueError(
            f"speculative_algorithm {args.speculative_algorithm!r}: choose from "
            f"{', '.join(ALGORITHMS)}"
        )
    steps, tokens = args.speculative_num_steps, args.speculative_num_draft_tokens
    if steps is not None and steps < 1:
        raise ValueError(f"speculative_num_steps {steps}: wanted at least 1")
    if args.speculative_eagle_topk not in (None, 1):
        raise ValueError(
            f"speculative_eagle_topk {args.speculative_eagle_topk}: drafts are a chain, not a "
            "tree; leave it out or give 1"
        )
    if tokens is not None and tokens != 1 + (tokens - 1 if steps is None else steps):
        raise ValueError(
            f"speculative_num_draft_tokens {tokens}: a chain of {steps} steps gives {steps} drafts "
            f"and one more token; leave it out or give {steps + 1 if steps else ''}"
        )
    simulated = args.speculative_simulate_acceptance
    if simulated is not None and not 0 <= simulated <= 1:
        raise ValueError(
            f"speculative_simulate_acceptance {simulated}: wanted a probability, 0 to 1"
        )
    if tokens is not None and tokens < 2:
        raise ValueError(f"speculative_num_draft_tokens {tokens}: wanted at least 2")


def draft_depths(args: EngineArgs, config: InklingConfig) -> int:
    """Draft blocks to run behind the model; 0 without speculation.

    Raises: ValueError: the checkpoint has fewer.
    """
    if args.speculative_algorithm is None:
        return 0
    blocks = 0 if config.mtp is None else config.mtp.num_blocks
    steps = args.speculative_num_steps
    if steps is None and args.speculative_num_draft_tokens is not None:
        steps = args.speculative_num_draft_tokens - 1
    if blocks == 0 or (steps is not None and steps > blocks):
        wanted = "draft blocks" if steps is None else f"{steps} draft blocks"
        raise ValueError(
            f"speculative_algorithm {args.speculative_algorithm} needs {wanted}; this checkpoint's "
            f"config.json has {blocks} (mtp_config.num_nextn_predict_layers). Files saved by "
            "transformers have none"
        )
    return min(DEFAULT_STEPS, blocks) if steps is None else steps
