"""Prompt steps from graphs beside the same steps kernel by kernel.

    python -m bench.prompt_graphs --config config.json --layers 12 --rank-slice 8

Weights are random. One engine serves one prompt at a time: time to the first token of prompts that
share nothing, with the graphs and with the engine's prefill runner taken away. Greedy tokens of
both are compared first. One JSON row a length; with --rank-slice the tokens mean nothing, the times
do.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.rows import provenance
from inkling_rocm.bench.rows import append_rows, machine
from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import choose_device


def prompts_of(length: int, count: int, salt: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    return [[(17 * i + 101 * (salt + n)) % 5000 + 10 for i in range(length)] for n in range(count)]


def first_tokens(engine: Engine, prompts: Sequence[list[int]]) -> tuple[list[int], list[float]]:
    """The first token of each prompt alone, and how long it took, ms."""
    tokens, times = [], []
    for prompt in prompts:
        began = time.perf_counter()
        found = engine.generate(
            input_ids=prompt, sampling_params={"temperature": 0.0, "max_new_tokens": 1}
        )
        times.append(1e3 * (time.perf_counter() - began))
        tokens += found["output_ids"]
    return tokens, times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rank-slice", type=int)
    parser.add_argument("--lengths", default="24,60,120,250,500")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--output-file", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level="INFO")
    lengths = [int(length) for length in options.lengths.split(",")]
    args = EngineArgs(
        model_path=options.config,
        load_format="dummy",
        skip_tokenizer_init=True,
        json_model_override_args=json.dumps({"num_hidden_layers": options.layers}),
        rank_slice=options.rank_slice,
        max_running_requests=16,
        max_total_tokens=1 << 16,
        context_length=4096,
        cuda_graph_bs=(1,),
        cuda_graph_max_bs_prefill=max(lengths) + 12,
        disable_radix_cache=True,
    )
    with Engine(args) as engine:
        local = engine._core.executor
        runner = local.prefill
        assert runner is not None, "prompt steps were not captured"
        for length in lengths:
            prompts = prompts_of(length, options.runs, salt=length)
            found = {}
            for how in (runner, None, runner, None):  # the first two compile
                local.prefill = how
                found[how is not None] = first_tokens(engine, prompts)
            equal = sum(a == b for a, b in zip(found[True][0], found[False][0], strict=True))
            row = {
                "op": "prompt_graphs",
                "case": f"{length} tokens",
                "layers": options.layers,
                "config": Path(options.config).name,
                "rank_slice": options.rank_slice,
                "graph_ms": round(statistics.median(found[True][1]), 3),
                "launched_ms": round(statistics.median(found[False][1]), 3),
                "gate": f"{equal} of {len(prompts)} first tokens equal",
                **machine(choose_device(None)),
                **provenance(),
            }
            print(json.dumps(row), flush=True)
            if options.output_file is not None:
                append_rows(options.output_file, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
