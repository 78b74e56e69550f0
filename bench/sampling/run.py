"""Measure sampling and lm_head on this GPU: correctness first, then medians of captured graphs.

    python -m bench.sampling.run --out rows.jsonl

The floor of sampling is the logits read once; that of lm_head its weights, at the copy rate
measured here. The peer of sampling is the usual sort: softmax, sort, cumulative sum, multinomial.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from bench.moe.timing import ceilings, count_launches, time_calls
from bench.rows import Rows
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.engine.sampler import SampleRow, sample
from inkling_rocm.host import SingleRank
from inkling_rocm.kernels.lm_head import MAX_TOKENS, local_logits
from inkling_rocm.kernels.sampling import SamplingRows, sample_rows
from inkling_rocm.ops.lm_head import lm_head
from kernel_base.arch import arch_of_device

VOCABULARY, HIDDEN, MUP = 200058, 6144, 24.0
BATCHES = (1, 8, 32, 128)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top_p .95": SamplingParams(top_p=0.95),
    "top_k 50 top_p .95": SamplingParams(top_k=50, top_p=0.95),
    "min_p .05": SamplingParams(min_p=0.05),
    "top_p .95, penalties": SamplingParams(
        top_p=0.95, frequency_penalty=0.5, logit_bias={5: 1.0, 9: 2.0}
    ),
}
SHAPES = ("zipf", "normal 4", "normal 1")


def make_logits(shape: str, n: int) -> torch.Tensor:
    """ "zipf": probabilities proportional to rank^-1.5, about what a language model gives (the top
    0.95 of the mass are some 500 tokens); "normal s": normal logits of that standard deviation,
    where no small head exists."""
    if shape == "zipf":
        ranks = torch.rand(n, VOCABULARY, device="cuda").argsort(-1) + 1
        return -1.5 * ranks.float().log()
    return torch.randn(n, VOCABULARY, device="cuda") * float(shape.split()[1])


def sort_sampler(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What a sampler of torch operations does."""
    probs, ids = (logits / params.temperature).softmax(-1).sort(-1, descending=True)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before > params.top_p, 0.0)
    if params.top_k > 0:
        probs[:, params.top_k :] = 0.0
    return ids.gather(1, torch.multinomial(probs, 1))


def host_us(call: Callable[[], object], repeats: int = 7) -> float:
    """Median wall time of a call that ends in a read-back."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(sorted(times)[repeats // 2] * 1e6, 1)


def sample_rows_of(params: SamplingParams, n: int) -> list[SampleRow]:
    rows = []
    for i in range(n):
        edits = LogitEdits(params, [1], ())
        edits.add(11)
        rows.append(SampleRow(params, i, 10, edits))
    return rows


def measure_sampling(out: Rows, rate: float) -> None:
    device = torch.device("cuda")
    for shape in SHAPES:
        for name, params in PARAMS.items():
            for n in BATCHES:
                logits = make_logits(shape, n)
                rows = sample_rows_of(params, n)
                sampler = DeviceSampler(
                    vocabulary=VOCABULARY, slots=n, device=device, arch=out.arch
                )
                for slot, row in enumerate(rows):
                    sampler.admit(slot, row.edits)
                on_device: SamplingRows = sampler.rows(rows, list(range(n)))
                few = min(n, 8)
                want = sample(logits[:few].cpu(), rows[:few], keep_logits=True)
                got = sample_rows(logits, on_device, arch=out.arch)[0][:few].tolist()
                same = sum(a == b for a, b in zip(want, got, strict=True))
                case = f"{name}, {shape}, n={n}"
                if same < few - 1:
                    out.add("sample", case, f"fail: {same} of {few} tokens", n=n)
                    continue
                found = time_calls(
                    lambda _, x=logits, r=on_device: sample_rows(x, r, arch=out.arch), 4
                )
                floor = logits.numel() * 4 / rate * 1e6
                out.add(
                    "sample", case, "pass", n=n, same_tokens=f"{same}/{few}", **found,
                    launches=count_launches(
                        lambda x=logits, r=on_device: sample_rows(x, r, arch=out.arch)
                    ),
                    floor_us=round(floor, 2), times_floor=round(found["p50_us"] / floor, 2),
                    torch_engine_us=host_us(
                        lambda x=logits, r=rows: sample(x, r, keep_logits=True)
                    ),
                    torch_sort_us=host_us(lambda x=logits, p=params: sort_sampler(x, p))
                    if params.temperature else None,
                )  # fmt: skip


def measure_head(out: Rows, rate: float) -> None:
    for case, vocabulary in (("TP1", VOCABULARY), ("TP8", 201024 // 8)):
        padded = 201024 if case == "TP1" else vocabulary
        w = (torch.randn(padded, HIDDEN, device="cuda") / 78).bfloat16()
        for n in (*BATCHES[:-1], MAX_TOKENS):
            x = torch.randn(n, HIDDEN, device="cuda").bfloat16()

            def ours(_: int = 0, x=x, w=w, vocabulary=vocabulary) -> torch.Tensor:
                return local_logits(
                    x, w, mup_multiplier=MUP, vocabulary=vocabulary, dtype=torch.float32,
                    arch=out.arch,
                )  # fmt: skip

            def eager(_: int = 0, x=x, w=w, vocabulary=vocabulary) -> torch.Tensor:
                return lm_head(x, w, mup_multiplier=MUP, vocab_size=vocabulary, comm=SingleRank())

            def padded_product(_: int = 0, x=x, w=w) -> torch.Tensor:
                return F.linear(x / MUP, w).float()

            exact = (x.double() / MUP) @ w[:4096].double().t()
            error = float((ours()[:, :4096].double() - exact).norm() / exact.norm())
            budget = float((eager()[:, :4096].double() - exact).norm() / exact.norm())
            outcome = "pass" if error <= 2 * budget else f"fail: {error:.2g}, eager {budget:.2g}"
            floor = vocabulary * HIDDEN * 2 / rate * 1e6
            found = time_calls(ours, 4)
            out.add(
                "lm_head", f"{case}, n={n}", outcome, n=n, **found, floor_us=round(floor, 2),
                times_floor=round(found["p50_us"] / floor, 3),
                torch_us=time_calls(eager, 4)["p50_us"],
                torch_padded_us=time_calls(padded_product, 4)["p50_us"],
                error=error, eager_error=budget,
            )  # fmt: skip
        del w


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    out = Rows(
        parser.parse_args().out,
        device=torch.cuda.get_device_name(),
        arch=arch_of_device("cuda:0").name,
    )
    rate, _ = ceilings()
    print(f"copy rate {rate / 1e12:.2f} TB/s", flush=True)
    measure_head(out, rate)
    measure_sampling(out, rate)


if __name__ == "__main__":
    main()
