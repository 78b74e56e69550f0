"""Tensor and expert parallelism beside one rank: the same greedy tokens, and their speed.

    python -m bench.tensor_parallel --config config.json --layers 6 --modes tp1,tp2,ep2

Weights are random. GPUs are those that CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) leaves. Every
mode is an engine in a process of its own (a profiler that has run once slows the later graphs of
its process): greedy tokens of a batch, decode steps by batch size (with what rank 0 spends in
collectives, waits for the others included), and the time to the first token of a prompt. The modes
are measured one after another; with --start-together their engines are built at the same time
before that, which saves minutes where kernels are to be compiled and wants memory for all of them.
In fp32 the tokens must be equal; in bfloat16 sums round differently, and the row says what share of
the tokens is. One JSON row a result, written when a mode is done; exit status 1 if tokens differ in
fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
    times, vocabulary = [], min(engine.config.text.unpadded_vocab_size, 5000)
    for salt in range(runs):
        ids = [(17 * i + 1009 * salt) % vocabulary for i in range(prompt)]
        began = time.perf_counter()
        engine.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": 1})
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `batches` becomes a list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--modes", default="tp1,tp2,ep2", help="the first is what others are beside"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", help="cuda or cpu; default: GPUs if there are any")
    parser.add_argument("--batches", default="1,8,32,128", help="empty: tokens alone")
    parser.add_argument("--prompt", type=int, default=1024, help="of each decoding request")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prefill", type=int, default=8192, help="0: not timed")
    parser.add_argument("--start-together", action="store_true")
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--one-mode", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for mode in options.modes.split(","):
        mode_of(mode)
    options.batches = [int(size) for size in options.batches.split(",") if size]
    return options


def engine_args(options: argparse.Namespace, mode: str) -> EngineArgs:
    """An engine that holds the requests of every measurement."""
    ranks, experts = mode_of(mode)
    most = max([*options.batches, CHECKED])
    lengths = [CHECKED_PROMPT + CHECKED_TOKENS, options.prefill + 1]
    lengths += [options.prompt + new_tokens(options.steps)] if options.batches else []
    return EngineArgs(
        model_path=options.config,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        device=options.device,
        json_model_override_args=json.dumps({"num_hidden_layers": options.layers}),
        max_running_requests=most,
        cuda_graph_bs=tuple(sorted({*options.batches, CHECKED})),
        context_length=max(lengths),
        max_total_tokens=(most + 1) * (lengths[-1] + 2 * 64) + max(lengths),
        tp_size=ranks,
        ep_size=experts,
    )


def one_mode(options: argparse.Namespace) -> None:
    """Measure a mode: "ready" on stdout once its engine stands, then, when stdin has told the
    tokens to compare with (null: there are none yet), its rows, one a line."""
    mode = options.modes
    # Rows have stdout for themselves: whatever a library prints goes to stderr.
    rows = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(case: str, **found: object) -> None:
        row = {"op": "tensor_parallel", "case": f"{mode}, {case}", "layers": options.layers}
        row |= {"dtype": options.dtype, "config": Path(options.config).name, **found}
        row |= {"mode": mode, "gate": gate, **machine(choose_device(options.device))}
        row["nccl"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}
        rows.write(json.dumps(row | {"op": "tensor_parallel"} | provenance()) + "\n")

    began = time.perf_counter()
    with Engine(engine_args(options, mode)) as engine:
        start_s = round(time.perf_counter() - began, 1)
        rows.write(json.dumps("ready") + "\n")
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(f"{mode}: whoever started this process has ended")
        first = json.loads(line)
        tokens = greedy(engine)
        share = 1.0 if first is None else equal_share(tokens, first)
        gate = "pass" if first in (None, tokens) else f"{share:.3f} of the tokens"
        report("tokens", tokens=tokens, start_s=start_s)
        # All times before any profile, which would slow the graphs.
        timed = [
            measure(engine, size, options.prompt, options.steps, 0) for size in options.batches
        ]
        if options.prefill:
            took = round(first_token_ms(engine, options.prefill), 3)
            report(f"prompt {options.prefill}", first_token_ms=took)
        for size, times in zip(options.batches, timed, strict=True):
            profiled = measure(engine, size, options.prompt, options.steps)
            report(f"decode, batch {size}", **(profiled | times))


class ModeProcess:
    """One mode in a process of its own; what it logs goes to this one's stderr."""

    def __init__(self, mode: str, arguments: list[str]):
        self.mode = mode
        command = [sys.executable, "-u", "-m", "bench.tensor_parallel", *arguments]
        self._process = subprocess.Popen(
            [*command, "--modes", mode, "--one-mode"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _line(self) -> Any:
        """What it writes next; None = it has ended well.

        Raises: RuntimeError: it has not.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        if self._process.wait() != 0:
            raise RuntimeError(
                f"mode {self.mode} ended with status {self._process.returncode}; "
                "its reason is above"
            )
        return None

    def wait_ready(self) -> None:
        """Until its engine stands."""
        self._line()

    def measure(self, first: list[list[int]] | None):
        """Its rows as they come. Args: first: tokens to compare with."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next line says that it has ended
            self._process.stdin.write(json.dumps(first) + "\n")
            self._process.stdin.flush()
        while (row := self._line()) is not None:
            yield row

    def end(self) -> None:
        """Stop it where it has not ended: its followers end with it."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def main() -> int:
    options = parse()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.one_mode:
        one_mode(options)
        return 0
    log = logging.getLogger("bench.tensor_parallel")
    modes = options.modes.split(",")
    running: list[ModeProcess] = []
    first: list[list[int]] | None = None
    differ = False
    try:
        if options.start_together:
            running = [ModeProcess(mode, sys.argv[1:]) for mode in modes]
            for process in running:
                process.wait_ready()
        for index, mode in enumerate(modes):
            log.info("mode %s, %d of %d", mode, index + 1, len(modes))
            if not options.start_together:
                running.append(ModeProcess(mode, sys.argv[1:]))
                running[-1].wait_ready()
            for row in running[index].measure(first):
                tokens = row.pop("tokens", None)
                first = tokens if first is None else first
                differ |= row["gate"] != "pass"
                print(json.dumps(row), flush=True)
                if options.output_file is not None:
                    append_rows(options.output_file, [row])
    except RuntimeError as error:
        log.error("%s", error)
        return 2
    finally:
        for process in running:
            process.end()
    return 1 if differ and options.dtype == "float32" else 0


if __name__ == "__main__":
    sys.exit(main())
