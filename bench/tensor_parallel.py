"""Tensor parallelism beside one rank: the same greedy tokens, and its speed.

    python -m bench.tensor_parallel --config config.json --layers 4 --tp 2

Weights are random. GPUs are those that CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) leaves. In fp32
the tokens must be equal; with --dtype bfloat16 sums round differently, so only speed is compared.
One JSON row for each size goes to stdout; exit status 1 if tokens differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from bench.rows import provenance
from inkling_rocm.bench.rows import machine
from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import choose_device


def measure(args: EngineArgs, batch: int, prompt: int, new_tokens: int) -> tuple[list, dict]:
    """Greedy tokens of a batch, and seconds of its decode steps."""
    with Engine(args) as engine:
        vocabulary = engine.config.text.unpadded_vocab_size
        prompts = [[(31 * i + 7 * b + 1) % vocabulary for i in range(prompt)] for b in range(batch)]

        def run(count: int) -> tuple[list, float]:
            params = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
            began = time.perf_counter()
            found = engine.generate(input_ids=prompts, sampling_params=params)
            return [one["output_ids"] for one in found], time.perf_counter() - began

        run(2)  # compilation
        _, first = run(1)
        tokens, whole = run(new_tokens)
    step = (whole - first) / (new_tokens - 1)
    row = {"decode_step_ms": round(1e3 * step, 3), "prefill_ms": round(1e3 * first, 2)}
    return tokens, {**row, "tokens_per_s": round(batch / step, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    tokens = {}
    for tp in (1, options.tp):
        args = EngineArgs(
            model_path=options.config,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=options.dtype,
            device=options.device,
            json_model_override_args=json.dumps({"num_hidden_layers": options.layers}),
            max_running_requests=options.batch,
            context_length=options.prompt + options.new_tokens,
            tp_size=tp,
            ep_size=options.ep if tp > 1 else 1,
        )
        tokens[tp], found = measure(args, options.batch, options.prompt, options.new_tokens)
        row = {
            "op": "tensor_parallel",
            "case": f"TP{tp}, batch {options.batch}, prompt {options.prompt}",
            "layers": options.layers,
            "dtype": options.dtype,
            "ep_size": args.ep_size,
            **found,
            "tokens_equal_tp1": tokens[tp] == tokens[1],
            **machine(choose_device(options.device)),
            **provenance(),
        }
        print(json.dumps(row), flush=True)
    differ = options.dtype == "float32" and tokens[options.tp] != tokens[1]
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
