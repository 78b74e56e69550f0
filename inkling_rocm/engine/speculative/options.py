"""What `--speculative-*` may say, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inkling_rocm.checkpoint.demo import resolve_model_path
from inkling_rocm.checkpoint.dflash import random_dflash
from inkling_rocm.config import InklingConfig
from inkling_rocm.config_dflash import DFlashConfig, load_dflash_config

if TYPE_CHECKING:
    from inkling_rocm.engine.args import EngineArgs

# Without --speculative-num-steps. A guess: deep chains cost throughput, shallow ones latency.
DEFAULT_STEPS = 3
ALGORITHMS = ("EAGLE", "DFLASH")


def check_speculative(args: EngineArgs) -> None:
    """Raises: ValueError: arguments that contradict each other or ask for what does not exist."""
    if args.speculative_algorithm is None:
        given = [
            name
            for name in (
                "num_steps",
                "num_draft_tokens",
                "eagle_topk",
                "use_rejection_sampling",
                "draft_model_path",
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
    _check_draft_path(args)
    steps, tokens = args.speculative_num_steps, args.speculative_num_draft_tokens
    if args.speculative_algorithm == "DFLASH":
        if steps not in (None, 1):
            raise ValueError(
                f"speculative_num_steps {steps}: DFLASH drafts a block in one step; leave it out "
                "and give speculative_num_draft_tokens"
            )
        steps = None
    if steps is not None and steps < 1:
        raise ValueError(f"speculative_num_steps {steps}: wanted at least 1")
    if args.speculative_eagle_topk not in (None, 1):
        raise ValueError(
            f"speculative_eagle_topk {args.speculative_eagle_topk}: drafts are a chain, not a "
            "tree; leave it out or give 1"
        )
    if tokens is not None and tokens < 2:
        raise ValueError(f"speculative_num_draft_tokens {tokens}: wanted at least 2")
    if tokens is not None and steps is not None and tokens != steps + 1:
        raise ValueError(
            f"speculative_num_draft_tokens {tokens}: a chain of {steps} steps gives {steps} drafts "
            f"and one more token; leave it out or give {steps + 1}"
        )
    simulated = args.speculative_simulate_acceptance
    if simulated is not None and not 0 <= simulated <= 1:
        raise ValueError(
            f"speculative_simulate_acceptance {simulated}: wanted a probability, 0 to 1"
        )


def draft_depths(args: EngineArgs, config: InklingConfig) -> int:
    """Draft blocks to run behind the model; 0 without speculation.

    Raises: ValueError: the checkpoint has fewer.
    """
    if args.speculative_algorithm != "EAGLE":
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


def block_draft(args: EngineArgs, config: InklingConfig) -> DFlashConfig | None:
    """The config of DFLASH's draft; None with another algorithm.

    Raises: ValueError: it is not one, belongs to another model, or drafts fewer tokens than asked
        for. FileNotFoundError, NotADirectoryError: the path is not a folder with a config.json.
    """
    if args.speculative_algorithm != "DFLASH":
        return None
    if all(config.text.layer_is_local):
        raise ValueError(
            "speculative_algorithm DFLASH keeps its keys and values in the pages of global layers, "
            "and this model has none"
        )
    assert args.speculative_draft_model_path is not None
    path = Path(args.speculative_draft_model_path).expanduser()
    if args.speculative_draft_model_path == "demo":
        draft = random_dflash(config.text)
    elif args.load_format == "dummy" and path.is_file():  # a config.json is all a dummy needs
        draft = load_dflash_config(path)
    else:
        draft = load_dflash_config(resolve_model_path(path))
    draft.check_target(config.text)
    tokens = args.speculative_num_draft_tokens
    if tokens is not None and tokens > draft.block_size:
        raise ValueError(
            f"speculative_num_draft_tokens {tokens}: this draft was made for blocks of "
            f"{draft.block_size} (block_size of its config.json); give at most that"
        )
    return draft


def block_drafts(args: EngineArgs, draft: DFlashConfig) -> int:
    """Drafts of a round: a block without its first token."""
    return (args.speculative_num_draft_tokens or draft.block_size) - 1


def _check_draft_path(args: EngineArgs) -> None:
    given = args.speculative_draft_model_path is not None
    if args.speculative_algorithm == "DFLASH" and not given:
        raise ValueError(
            "speculative_algorithm DFLASH needs speculative_draft_model_path: the draft's folder, "
            "or 'demo' for a random one"
        )
    if args.speculative_algorithm == "EAGLE" and given:
        raise ValueError(
            f"speculative_draft_model_path {args.speculative_draft_model_path!r}: EAGLE drafts "
            "with the blocks inside the model's own checkpoint; leave it out"
        )
