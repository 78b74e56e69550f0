"""Correctness at the real widths: greedy output with N drafts is that without speculation.

    python -m bench.speculation.gate --out rows.jsonl --override '{"num_hidden_layers": 6}'

Requests run together, in every way that rounds can be run. In float32 outputs are to be equal. In
bfloat16 a forward of another batch shape rounds differently, and over random weights and many
experts that grows: how far is shown by requests without speculation that run one after the other
(0 steps), beside those that run together.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from bench.rows import Rows
from bench.speculation.engines import describe, engine_args, parsed, parser_of, parts_for, release
from bench.speculation.rounds import prompt
from inkling_rocm.bench.rows import machine
from inkling_rocm.engine import Engine, EngineArgs, SamplingParams
from inkling_rocm.engine.load import EngineParts, load_parts
from inkling_rocm.engine.request import TokenLogprob

PROMPTS, TOKENS = 4, 32
TOP = 64  # most probable tokens that are kept of the output to compare with
NEAR_TIE = 0.1  # nats
Outputs = list[list[TokenLogprob]]


def greedy(
    engine: Engine,
    length: int,
    *,
    prompts: int = PROMPTS,
    tokens: int = TOKENS,
    alone: bool = False,
) -> Outputs:
    """What greedy requests of `length` prompt tokens are answered, each with the most probable
    tokens.

    Args: alone: one after the other.
    """
    params = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)

    def submit(row: int):
        return engine.submit(prompt(row, length, engine), params, logprobs=TOP, stream=False)

    def found(handle) -> list[TokenLogprob]:
        return [token for update in handle for token in update.logprobs]

    if alone:
        return [found(submit(row)) for row in range(prompts)]
    return [found(handle) for handle in [submit(row) for row in range(prompts)]]


def gate(found: Outputs, wanted: Outputs) -> str:
    """ "pass", with how far outputs could be compared: up to where two tokens are so close that
    rounding decides; else where they differ by more."""
    equal, ties = 0, []
    for got, want in zip(found, wanted, strict=True):
        for at, (a, b) in enumerate(zip(got, want, strict=True)):
            if a.token_id == b.token_id:
                equal += 1
                continue
            gap = b.logprob - dict(b.top).get(a.token_id, -np.inf)
            if not gap <= NEAR_TIE:
                less = f"{gap:.3f} nats" if gap < np.inf else "much"
                return f"differs from token {at} on, which is {less} less probable"
            ties.append(gap)
            break
    total = sum(map(len, wanted))
    if not ties:
        return f"pass: {equal} tokens"
    return (
        f"pass: {equal} of {total} tokens, {len(ties)} outputs part at near ties of up to "
        f"{max(ties):.3f} nats"
    )


def ways_of(engine: Engine) -> Sequence[str]:
    """How its rounds can be run."""
    return (
        ("launched",) if engine._core.executor.rounds is None else ("one graph", "a graph a step")
    )


def outputs(
    parts: EngineParts, args: EngineArgs, options: argparse.Namespace, *, alone: bool = False
) -> dict[str, Outputs]:
    """Of one engine, by the ways its rounds are run."""
    steps = args.speculative_num_steps or 0
    sizes = {"prompts": options.prompts, "tokens": options.tokens}
    release()
    with Engine(args, parts=parts_for(parts, steps)) as engine:
        if not steps:
            return {"": greedy(engine, options.prompt, **sizes, alone=alone)}
        found = {}
        for way in ways_of(engine):
            if way == "a graph a step":
                with torch.inference_mode():
                    engine._core.executor.rounds.capture(one_graph=False)
            found[way] = greedy(engine, options.prompt, **sizes)
        return found


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each output")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--context", type=int, help="tokens; default: what is needed")
    options = parsed(parser, arguments)
    needed = options.prompt + options.tokens + max(options.steps) + 2 * EngineArgs.page_size
    context = options.context or needed

    def args_of(steps: int, dtype: str) -> EngineArgs:
        args = engine_args(options, steps, context=context, batches=(options.prompts,))
        return replace(args, dtype=dtype)

    for dtype in options.dtypes.split(","):
        parts = load_parts(args_of(max(options.steps), dtype))
        of = machine(parts.device)
        rows = Rows(str(options.out), device=of["device"], arch=of["arch"])

        def add(steps: int, way: str, outcome: str, dtype: str = dtype, rows: Rows = rows) -> None:
            rows.add(
                "gate",
                f"{dtype}, {steps} steps, {way}",
                outcome,
                **describe(options, steps),
                dtype=dtype,
                how=way,
            )

        wanted = outputs(parts, args_of(0, dtype), options)[""]
        alone = outputs(parts, args_of(0, dtype), options, alone=True)[""]
        add(0, "one request after the other", gate(alone, wanted))
        for steps in options.steps:
            args = args_of(steps, dtype)
            found = outputs(parts, args, options)
            if "launched" not in found:
                found |= outputs(parts, replace(args, disable_cuda_graph=True), options)
            for way, some in found.items():
                add(steps, way, gate(some, wanted))
        del parts
        release()


if __name__ == "__main__":
    main()
