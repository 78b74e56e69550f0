"""What the measurements of speculation run: one rank's engine over random weights."""

from __future__ import annotations

import argparse
import gc
import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch

from bench.rows import ROOT
from inkling_rocm.engine import EngineArgs
from inkling_rocm.engine.load import EngineParts

# --tiny: Inkling-Small's config with these values.
TINY = {
    "text_config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "local_layer_ids": [0],
        "dense_mlp_idx": 1,
        "vocab_size": 320,
        "unpadded_vocab_size": 300,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 96,
        "intermediate_size": 32,
    },
    "audio_config": {"decoder_dmodel": 64},
    "vision_config": {"decoder_dmodel": 64},
}


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def wholes(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With the arguments that say what is run and where rows go."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="rows are appended to this file")
    parser.add_argument("--config", default=str(ROOT / "tests/data/configs/inkling_small.json"))
    parser.add_argument("--rank-slice", type=int, default=8, help="ranks, one of which is run")
    parser.add_argument("--override", default="{}", help="JSON over the config's values")
    parser.add_argument("--steps", type=wholes, default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--device", default=None)
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.tiny:
        options.rank_slice = None
        options.override = json.dumps(TINY)
    return options


def engine_args(
    options: argparse.Namespace, steps: int, *, context: int, batches: tuple[int, ...]
) -> EngineArgs:
    """Of an engine with that many draft steps; 0 = without speculation."""
    return EngineArgs(
        model_path=options.config,
        load_format="dummy",
        device=options.device,
        skip_tokenizer_init=True,
        rank_slice=options.rank_slice,
        json_model_override_args=options.override,
        max_running_requests=max(batches),
        cuda_graph_bs=batches,
        disable_prefill_cuda_graph=True,  # with speculation there are none
        context_length=context,
        speculative_algorithm="EAGLE" if steps else None,
        speculative_num_steps=steps or None,
    )


def describe(options: argparse.Namespace, steps: int) -> dict:
    """What every row of a run says about it."""
    return {
        "model": "tiny" if options.tiny else Path(options.config).stem,
        "rank_slice": options.rank_slice,
        "override": None if options.tiny else options.override,
        "prompt_len": options.prompt,
        "steps": steps,
    }


def parts_for(parts: EngineParts, steps: int) -> EngineParts:
    """The same weights with fewer draft blocks; each block is prepared for its place once."""
    assert parts.drafts is not None
    if not steps:
        return replace(parts, drafts=None)
    drafts = copy(parts.drafts)
    drafts.depths = steps
    drafts._weights, drafts._layers = drafts._weights[:steps], drafts._layers[:steps]
    return replace(parts, drafts=drafts)


def release() -> None:
    """Give the memory of engines that are gone back to the GPU: the next plans with what is
    free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
