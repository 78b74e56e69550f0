"""Measure speculation on this machine: the output first, then rounds and tokens per second.

    python -m bench.speculation.run --out rows.jsonl            one GPU, one rank of Inkling-Small
    python -m bench.speculation.run --out rows.jsonl --tiny     a CPU, a tiny model: that it runs

For each number of draft steps N:

- gate: greedy output with N drafts is that without speculation;
- op "round": time of a round (verification and draft chain) at each batch, in the ways it can be
  run; how often the host waited for the device in a profiled window of rounds;
- op "acceptance": tokens per second with acceptance simulated at the given probabilities.

Without speculation (N = 0) a round is a decode step. Weights are random: acceptance is simulated,
and what comes out of those runs is meaningless. Rows are appended as they come.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.profiler import profile

from bench.rows import ROOT, Rows
from bench.speculation.rounds import (
    BLOCKING,
    WAITING,
    RoundWatch,
    Window,
    most_tokens,
    prompt,
    run_rounds,
)
from inkling_rocm.bench.rows import machine
from inkling_rocm.engine import Engine, EngineArgs, SamplingParams
from inkling_rocm.engine.load import EngineParts, load_parts
from inkling_rocm.engine.request import TokenLogprob

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
GATE_PROMPTS, GATE_TOKENS = 4, 32
TOP = 20  # log probabilities of the run without speculation that are kept for the gate
NEAR_TIE = 0.1  # nats: forwards of other batch shapes round logits differently
SKIP = 5  # rounds before those that are watched
PROFILED = 20  # rounds


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def wholes(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="rows are appended to this file")
    parser.add_argument("--config", default=str(ROOT / "tests/data/configs/inkling_small.json"))
    parser.add_argument("--rank-slice", type=int, default=8, help="ranks, one of which is run")
    parser.add_argument("--override", default="{}", help="JSON over the config's values")
    parser.add_argument("--batches", type=wholes, default=[1, 32])
    parser.add_argument("--steps", type=wholes, default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument(
        "--compared", type=wholes, default=None,
        help="those of --steps whose rounds are also run as a graph a step and launched kernel by "
        "kernel; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--acceptances", type=numbers, default=[0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    )
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--context", type=int, help="tokens; default: what --rounds may need")
    parser.add_argument("--rounds", type=int, default=100, help="timed ones")
    parser.add_argument("--device", default=None)
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.rank_slice = None
        options.override = json.dumps(TINY)
    return options


def engine_args(options: argparse.Namespace, steps: int) -> EngineArgs:
    """Of an engine with that many draft steps; 0 = without speculation."""
    rounds = SKIP + max(options.rounds, PROFILED)
    longest = max(most_tokens(rounds, max(options.batches), max(options.steps)), GATE_TOKENS)
    # A page more than is used: the scheduler admits a sequence only if each has one to spare. The
    # same for all steps, so that their kernels and splits of the keys are.
    context = options.prompt + longest + 2 * EngineArgs.page_size
    return EngineArgs(
        model_path=options.config,
        load_format="dummy",
        device=options.device,
        skip_tokenizer_init=True,
        rank_slice=options.rank_slice,
        json_model_override_args=options.override,
        max_running_requests=max(options.batches),
        cuda_graph_bs=tuple(options.batches),
        context_length=options.context or context,
        speculative_algorithm="EAGLE" if steps else None,
        speculative_num_steps=steps or None,
    )


def greedy(engine: Engine, length: int) -> list[list[TokenLogprob]]:
    """What greedy requests of `length` prompt tokens are answered, each with the most probable
    tokens."""
    params = SamplingParams(max_new_tokens=GATE_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [prompt(row, length, engine) for row in range(GATE_PROMPTS)]
    handles = [engine.submit(ids, params, logprobs=TOP, stream=False) for ids in prompts]
    return [[token for update in handle for token in update.logprobs] for handle in handles]


def gate(found: list[list[TokenLogprob]], wanted: list[list[TokenLogprob]]) -> str:
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
                return f"differs from token {at} on, which is {gap:.3f} nats less probable"
            ties.append(gap)
            break
    total = sum(map(len, wanted))
    if not ties:
        return f"pass: {equal} tokens"
    return (
        f"pass: {equal} of {total} tokens, {len(ties)} outputs part at near ties of up to "
        f"{max(ties):.3f} nats"
    )


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
    wanted: list[list[TokenLogprob]] | None,
    *,
    apart: bool = False,
) -> tuple[list[list[TokenLogprob]], str, str]:
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
    parts = load_parts(engine_args(options, max(options.steps)))
    of = machine(parts.device)
    rows = Rows(str(options.out), device=of["device"], arch=of["arch"])
    wanted, _, _ = measure_rounds(parts, engine_args(options, 0), options, rows, None)
    for steps in options.steps:
        args = engine_args(options, steps)
        _, outcome, way = measure_rounds(parts, args, options, rows, wanted)
        if way != "launched" and (options.compared is None or steps in options.compared):
            launched = replace(args, disable_cuda_graph=True)
            measure_rounds(parts, args, options, rows, wanted, apart=True)
            measure_rounds(parts, launched, options, rows, wanted)
        if options.acceptances:
            measure_acceptance(parts, args, options, rows, outcome)


if __name__ == "__main__":
    main()
