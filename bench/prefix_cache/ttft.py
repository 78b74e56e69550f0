"""Time to the first token against the part of the prompt that the prefix cache has.

    python -m bench.prefix_cache.ttft                  prints, and appends rows
    python -m bench.prefix_cache.ttft --no-rows        prints only
    python -m bench.prefix_cache.ttft --model-path DIR --device cuda --tokens 32768

The beginning of a random prompt is asked first, then the whole prompt is timed, with another prompt
each time. "host" gives everything to the host tier in between. Each must find exactly what was
asked before, and give the first token that an engine without a cache gives.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time

import torch

from bench.prefix_cache.tables import TTFT_FILE
from bench.rows import append, result_row
from inkling_rocm.engine import Engine, SamplingParams

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.875, 0.96875)
RUNS = 7
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)


def ask(engine: Engine, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds to the first token, the token, and how many prompt tokens were cached."""
    begin = time.perf_counter()
    (update,) = list(engine.submit(prompt, GREEDY))
    seconds = time.perf_counter() - begin
    if update.error is not None:
        raise RuntimeError(update.error)
    return seconds, update.token_ids[0], update.cached_tokens


def sample(
    engine: Engine, cold: Engine, tokens: int, known: int, source: str, run: int
) -> tuple[float, str]:
    """Seconds to the first token of a prompt of which `known` tokens are cached, and what is wrong
    with it: nothing if it is as it should be."""
    draw = random.Random(f"{tokens} {known} {source} {run}")
    prompt = [draw.randrange(1000, 100_000) for _ in range(tokens)]
    _, wanted, _ = ask(cold, prompt)
    if known:
        ask(engine, prompt[: known + 1])
    if source == "host":
        engine._core.scheduler.cache.save()
    seconds, token, found = ask(engine, prompt)
    if found != known:
        return seconds, f"cached {found} instead of {known}"
    return seconds, "" if token == wanted else "another token than without a cache"


def row_of(engine: Engine, tokens: int, known: int, source: str, samples: list) -> dict:
    seconds = [took for took, _ in samples]
    wrong = sorted({fault for _, fault in samples if fault})
    kind = engine.args.device or "cpu"
    name = torch.cuda.get_device_name() if kind == "cuda" else f"{platform.machine()} CPU"
    threads = f", {torch.get_num_threads()} threads" if kind == "cpu" else ""
    quantiles = statistics.quantiles(seconds, n=5, method="inclusive")
    return result_row(
        "ttft",
        f"{source}, {known} of {tokens}",
        device=name + threads,
        arch="cpu" if kind == "cpu" else name,
        model=engine.model_name,
        source=source,
        prompt_tokens=tokens,
        cached_tokens=known,
        cached_fraction=known / tokens,
        p20_ms=round(quantiles[0] * 1e3, 2),
        p50_ms=round(statistics.median(seconds) * 1e3, 2),
        p80_ms=round(quantiles[3] * 1e3, 2),
        runs=len(samples),
        gate="; ".join(wrong) or "pass",
        evidence="measured",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-rows", action="store_true", help="do not append to bench/results")
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    arguments = parser.parse_args()
    settings = {
        "model_path": arguments.model_path,
        "device": arguments.device,
        "skip_tokenizer_init": True,
        "max_running_requests": 4,
    }
    tokens = arguments.tokens
    with (
        Engine(**settings, disable_radix_cache=True) as cold,
        Engine(**settings, enable_hierarchical_cache=True, hicache_size=0.5) as engine,
    ):
        page = engine.args.page_size
        known = [int(tokens * fraction) // page * page for fraction in FRACTIONS]
        cases = [
            (n, source) for source in ("device", "host") for n in known if n or source != "host"
        ]
        samples: dict[tuple[int, str], list] = {case: [] for case in cases}
        sample(engine, cold, tokens, 0, "device", -1)
        for run in range(RUNS):  # in turns: what else the machine does hits all alike
            for case in cases:
                samples[case].append(sample(engine, cold, tokens, *case, run))
        rows = [row_of(engine, tokens, *case, some) for case, some in samples.items()]
    for row in rows:
        print(row["case"], row["p50_ms"], "ms", row["gate"])
    if not arguments.no_rows:
        print(f"rows appended to {append(TTFT_FILE.removesuffix('.jsonl'), rows)}")


if __name__ == "__main__":
    main()
