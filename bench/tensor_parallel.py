"""Tensor and expert parallelism beside one rank: the same greedy tokens, and their speed.

    python -m bench.tensor_parallel --config config.json --layers 6 --modes tp1,tp2,ep2

Weights are random. GPUs are those that CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) leaves. Every
mode is an engine of its own: greedy tokens of a batch, decode steps by batch size (with what rank 0
spends in collectives, waits for the others included), and the time to the first token of a prompt.
In fp32 the tokens must be equal; in bfloat16 sums round differently, and the row says what share of
the tokens is. One JSON row a result; exit status 1 if tokens differ in fp32.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from pathlib import Path

import torch

from bench.engine_gpu import measure, new_tokens
from bench.rows import provenance
from inkling_rocm.bench.rows import append_rows, machine
from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import choose_device

CHECKED, CHECKED_PROMPT, CHECKED_TOKENS = 8, 200, 32


def mode_of(name: str) -> tuple[int, int]:
    """(ranks, expert-parallel ranks) of "tp2" or "ep2"."""
    ranks = int(name[2:])
    if name[:2] not in ("tp", "ep"):
        raise ValueError(f"mode {name!r}: wanted tp or ep and a number of ranks")
    return ranks, ranks if name[:2] == "ep" else 1


def greedy(engine: Engine) -> list[list[int]]:
    """Tokens of a small batch."""
    vocabulary = engine.config.text.unpadded_vocab_size
    prompts = [
        [(31 * i + 7 * row + 1) % vocabulary for i in range(CHECKED_PROMPT)]
        for row in range(CHECKED)
    ]
    params = {"temperature": 0.0, "max_new_tokens": CHECKED_TOKENS, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=params)
    return [one["output_ids"] for one in found]


def equal_share(tokens: list[list[int]], others: list[list[int]]) -> float:
    """Share of tokens before the first that differs, each row for itself."""
    equal = 0
    for mine, theirs in zip(tokens, others, strict=True):
        pairs = zip(mine, theirs, strict=True)
        equal += next((at for at, (a, b) in enumerate(pairs) if a != b), len(mine))
    return equal / sum(map(len, others))


def first_token_ms(engine: Engine, prompt: int, runs: int = 4) -> float:
    """Median over prompts that have no prefix in common, after one that compiles."""
    times = []
    for salt in range(runs):
        ids = [(17 * i + 1009 * salt) % 5000 + 10 for i in range(prompt)]
        began = time.perf_counter()
        engine.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": 1})
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--modes", default="tp1,tp2,ep2", help="the first is what others are beside"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="1,8,32,128", help="empty: tokens alone")
    parser.add_argument("--prompt", type=int, default=1024, help="of each decoding request")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prefill", type=int, default=8192, help="0: not timed")
    parser.add_argument("--output-file", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level="INFO")
    batches = [int(size) for size in options.batches.split(",") if size]
    most = max([*batches, CHECKED])
    lengths = [CHECKED_PROMPT + CHECKED_TOKENS, options.prefill + 1]
    lengths += [options.prompt + new_tokens(options.steps)] if batches else []
    first: list[list[int]] | None = None
    differ = False

    def report(case: str, **found: object) -> None:
        row = {"op": "tensor_parallel", "case": case, "layers": options.layers}
        row |= {"dtype": options.dtype, "config": Path(options.config).name, **found}
        row |= {**machine(choose_device(None)), **provenance()}
        print(json.dumps(row), flush=True)
        if options.output_file is not None:
            append_rows(options.output_file, [row])

    for mode in options.modes.split(","):
        ranks, experts = mode_of(mode)
        args = EngineArgs(
            model_path=options.config,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=options.dtype,
            json_model_override_args=json.dumps({"num_hidden_layers": options.layers}),
            max_running_requests=most,
            cuda_graph_bs=tuple(sorted({*batches, CHECKED})),
            context_length=max(lengths),
            max_total_tokens=(most + 1) * (lengths[-1] + 2 * 64) + max(lengths),
            tp_size=ranks,
            ep_size=experts,
        )
        began = time.perf_counter()
        with Engine(args) as engine:
            start = time.perf_counter() - began
            tokens = greedy(engine)
            first = tokens if first is None else first
            share = equal_share(tokens, first)
            differ |= tokens != first
            gate = "pass" if tokens == first else f"{share:.3f} of the tokens"
            report(f"{mode}, tokens", mode=mode, gate=gate, start_s=round(start, 1))
            # All times first: graphs are slower in a process in which a profiler has run.
            timed = [measure(engine, batch, options.prompt, options.steps, 0) for batch in batches]
            for batch, times in zip(batches, timed, strict=True):
                found = measure(engine, batch, options.prompt, options.steps) | times
                found |= {"op": "tensor_parallel", "mode": mode, "gate": gate}
                report(f"{mode}, decode, batch {batch}", **found)
            if options.prefill:
                took = round(first_token_ms(engine, options.prefill), 3)
                case = f"{mode}, prompt {options.prefill}"
                report(case, mode=mode, gate=gate, first_token_ms=took)
        del engine  # its memory goes back before the next one plans
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 1 if differ and options.dtype == "float32" else 0


if __name__ == "__main__":
    sys.exit(main())
