"""Measure speculation on this machine: rounds and tokens per second, after a look at the output.

    python -m bench.speculation.run --out rows.jsonl            one GPU, one rank of Inkling-Small
    python -m bench.speculation.run --out rows.jsonl --tiny     a CPU, a tiny model: that it runs

For each number of draft steps N:

- gate: greedy output with N drafts beside that without speculation (bench.speculation.gate tells
  what may be expected of it, and compares in float32);
- op "round": time of a round (verification and draft chain) at each batch, in the ways it can be
  run; how often the host waited for the device in a profiled window of rounds;
- op "acceptance": tokens per second with acceptance simulated at the given probabilities.

Without speculation (N = 0) a round is a decode step. Weights are random: acceptance is simulated,
and what comes out of those runs is meaningless. Rows are appended as they come.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace

import numpy as np
import torch
from torch.profiler import profile

from bench.rows import Rows
from bench.speculation.engines import (
    describe,
    engine_args,
    numbers,
    parsed,
    parser_of,
    parts_for,
    release,
    wholes,
)
from bench.speculation.gate import TOKENS, Outputs, gate, greedy
from bench.speculation.rounds import (
    BLOCKING,
    WAITING,
    RoundWatch,
    Window,
    most_tokens,
    run_rounds,
)
from inkling_rocm.bench.rows import machine
from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import EngineParts, load_parts

SKIP = 5  # rounds before those that are watched
PROFILED = 20  # rounds


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=wholes, default=[1, 32])
    for name, what in (("apart", "as a graph a step"), ("launched", "kernel by kernel")):
        parser.add_argument(
            f"--{name}", type=wholes, default=None,
            help=f"those of --steps whose rounds are also run {what}; default: all",
        )  # fmt: skip
    parser.add_argument(
        "--acceptances", type=numbers, default=[0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    )
    parser.add_argument(
        "--acceptance-only", action="store_true", help="no rounds, nor a look at the output"
    )
    parser.add_argument("--context", type=int, help="tokens; default: what --rounds may need")
    parser.add_argument("--rounds", type=int, default=100, help="timed ones")
    return parsed(parser, arguments)


def chosen(options: argparse.Namespace, steps: list[int] | None) -> list[int]:
    """Steps to do something for; None = all."""
    return options.steps if steps is None else steps


def args_for(options: argparse.Namespace, steps: int) -> EngineArgs:
    """Of the engine with that many draft steps."""
    rounds = SKIP + max(options.rounds, PROFILED)
    longest = max(most_tokens(rounds, max(options.batches), max(options.steps)), TOKENS)
    # A page more than is used: the scheduler admits a sequence only if each has one to spare. The
    # same for all steps, so that their kernels and splits of the keys are.
    context = options.context or options.prompt + longest + 2 * EngineArgs.page_size
    return engine_args(options, steps, context=context, batches=tuple(options.batches))


def round_numbers(window: Window, batch: int) -> dict:
    """What a row says of timed rounds."""
    us = 1e6 * np.array(window.round_s)
    p20, p50, p80 = (round(float(np.percentile(us, p)), 1) for p in (20, 50, 80))
    return {
        "batch": batch,
        "p20_us": p20,
        "p50_us": p50,
        "p80_us": p80,
        "rounds_per_s": round(window.rounds / (window.ends[-1] - window.ends[0]), 2),
        "tokens_per_s": round(window.tokens_per_s, 1),
        "acceptance": round(window.acceptance, 4),
    }


def waits(window: Window) -> dict:
    """Runtime calls a round in which the host waits; None where no runtime was seen (a CPU)."""
    calls = window.calls
    if not calls:
        return {"blocking_calls_per_round": None, "event_waits_per_round": None}
    found = {name: calls[name] for name in BLOCKING if calls[name]}
    return {
        "blocking_calls_per_round": round(sum(found.values()) / window.rounds, 3),
        "event_waits_per_round": round(sum(calls[name] for name in WAITING) / window.rounds, 3),
        "blocking_calls": found,
    }


def way_of(engine: Engine, *, apart: bool) -> str:
    """How its rounds run."""
    executor = engine._core.executor
    runner = executor.decode if executor.speculation is None else executor.rounds
    if runner is None:
        return "launched"
    return "a graph a step" if apart else "one graph"


def measure_rounds(
    parts: EngineParts,
    args: EngineArgs,
    options: argparse.Namespace,
    rows: Rows,
    wanted: Outputs | None,
    *,
    apart: bool = False,
) -> tuple[Outputs, str, str]:
    """Rows of op "round" for one engine.

    Args:    apart: record the verification and every depth as graphs of their own.
    Returns: the greedy output, the gate's outcome against `wanted`, and how rounds were run.
    """
    steps = args.speculative_num_steps or 0
    watch = RoundWatch(plain=not steps)
    release()
    with Engine(args, metrics=watch, parts=parts_for(parts, steps)) as engine:
        if apart:
            with torch.inference_mode():
                engine._core.executor.rounds.capture(one_graph=False)
        found = greedy(engine, options.prompt)
        outcome = gate(found, found if wanted is None else wanted)
        way = way_of(engine, apart=apart)
        for batch in options.batches:
            common = {"batch": batch, "prompt_len": options.prompt, "steps": steps, "skip": SKIP}
            timed = run_rounds(engine, watch, **common, rounds=options.rounds)
            profiled = run_rounds(engine, watch, **common, rounds=PROFILED, profiled=True)
            rows.add(
                "round",
                f"batch {batch}, {steps} steps, {way}",
                outcome,
                **describe(options, steps),
                how=way,
                **round_numbers(timed, batch),
                **waits(profiled),
            )
    return found, outcome, way


def measure_acceptance(
    parts: EngineParts, args: EngineArgs, options: argparse.Namespace, rows: Rows, outcome: str
) -> None:
    """Rows of op "acceptance"."""
    steps = args.speculative_num_steps or 0
    watch, args = RoundWatch(), replace(args, speculative_simulate_acceptance=0.0)
    release()
    with Engine(args, metrics=watch, parts=parts_for(parts, steps)) as engine:
        for probability in options.acceptances:
            engine._core.executor.speculation.simulated.fill_(probability)
            for batch in options.batches:
                window = run_rounds(
                    engine,
                    watch,
                    batch=batch,
                    prompt_len=options.prompt,
                    steps=steps,
                    skip=SKIP,
                    rounds=options.rounds,
                )
                rows.add(
                    "acceptance",
                    f"batch {batch}, {steps} steps, probability {probability}",
                    outcome,
                    **describe(options, steps),
                    probability=probability,
                    **round_numbers(window, batch),
                )


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with profile():
        pass  # its library wants to be set up by the main thread
    parts = load_parts(args_for(options, max(options.steps)))
    of = machine(parts.device)
    rows = Rows(str(options.out), device=of["device"], arch=of["arch"])
    if options.acceptance_only:
        for steps in options.steps:
            measure_acceptance(parts, args_for(options, steps), options, rows, "not compared")
        return
    wanted, _, _ = measure_rounds(parts, args_for(options, 0), options, rows, None)
    for steps in options.steps:
        args = args_for(options, steps)
        _, outcome, way = measure_rounds(parts, args, options, rows, wanted)
        if way != "launched" and steps in chosen(options, options.apart):
            measure_rounds(parts, args, options, rows, wanted, apart=True)
        if options.acceptances:
            measure_acceptance(parts, args, options, rows, outcome)
        if way != "launched" and steps in chosen(options, options.launched):
            launched = replace(args, disable_cuda_graph=True)
            measure_rounds(parts, launched, options, rows, wanted)


if __name__ == "__main__":
    main()
