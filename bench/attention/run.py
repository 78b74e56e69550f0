"""Benchmark the attention library on this GPU: `python -m bench.attention.run OUT.jsonl COMMIT
[group ...]`.

Groups: prefill, ragged, decode, verify, context, pages, memory (all when none is named). Rows are
appended only if
the correctness gate passed in this process. SGLang's kernels are timed beside ours when they can
be imported.
"""

from __future__ import annotations

import json
import sys

import torch
import triton

from bench.attention import peer_flex, peer_sglang
from bench.attention.gate import run_decode, run_gate, run_prefill
from bench.attention.problems import Problem, make_problem
from bench.attention.timing import time_graph, time_stream
from kernel_base.arch import arch_of_device
from triton_attn import DecodeWorkspace

LOCAL = {"window": 512, "extent": 512}
GLOBAL = {"window": 0, "extent": 1024}
# Ceilings measured on an H200 (MEASURED figures): copy bandwidth and a large bf16 matrix product.
CEILING_BYTES_PER_S, CEILING_FLOPS = 4.3e12, 7.9e14


def visible_pairs(p: Problem) -> int:
    """Query-key pairs one head attends to."""
    total = 0
    for q_len, kv_len in zip(p.q_lens, p.kv_lens, strict=True):
        for position in range(kv_len - q_len, kv_len):
            total += min(position + 1, p.window or position + 1)
    return total


def kv_bytes(p: Problem) -> int:
    """Bytes of the K and V rows that any query of the batch sees."""
    g, d = p.k_pages.shape[2:]
    seen = sum(
        min(n, p.window + q - 1) if p.window else n
        for q, n in zip(p.q_lens, p.kv_lens, strict=True)
    )
    return seen * g * d * 2 * p.k_pages.element_size()


class Recorder:
    """Appends rows with what every row must say about where it comes from."""

    def __init__(self, path: str, commit: str) -> None:
        self.path = path
        self.rows: list[dict] = []
        self.common = {
            "device": torch.cuda.get_device_name(),
            "arch": arch_of_device("cuda").name,
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "commit": commit.removesuffix("+"),
            "dirty": commit.endswith("+"),
            "gate": "passed",
            "evidence": "measured",
        }

    def add(self, op: str, case: str, impl: str, p: Problem | None, quantiles=None, **more) -> None:
        row = {"op": op, "case": case, "impl": impl, **self.common, **more}
        if quantiles:
            row["p20_us"], row["p50_us"], row["p80_us"] = quantiles
            flops = 4 * visible_pairs(p) * p.q.shape[1] * p.q.shape[2]
            seconds = quantiles[1] * 1e-6
            row["tflops"] = round(flops / seconds / 1e12, 1)
            row["gb_per_s"] = round(kv_bytes(p) / seconds / 1e9, 1)
            floor = max(flops / CEILING_FLOPS, kv_bytes(p) / CEILING_BYTES_PER_S)
            row["floor_us"], row["floor_fraction"] = (
                round(floor * 1e6, 1),
                round(floor / seconds, 3),
            )
        self.rows.append(row)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(op, case, impl, row.get("p50_us"), row.get("floor_us"), more or "", flush=True)


def _difference(a, b) -> float:
    return float((a - b).float().norm() / b.float().norm())


def _prefill_case(record: Recorder, op: str, case: str, p: Problem, flex=False) -> None:
    out = torch.empty_like(p.q)
    ours = run_prefill(p, out=out).clone()
    record.add(op, case, "triton_attn", p, time_stream(lambda: run_prefill(p, out=out)))
    record.add(
        op,
        case,
        "triton_attn without bias",
        p,
        time_stream(lambda: run_prefill(p, out=out, biased=False)),
    )
    peers = {"sglang 0.5.23": peer_sglang}
    if flex:
        peers["FlexAttention"] = peer_flex
    for name, module in peers.items():
        fn = module.prefill(p)
        gap = _difference(fn(), ours)
        record.add(op, case, name, p, time_stream(fn, repeats=6, warmup=1), difference=gap)


def prefill(record: Recorder) -> None:
    """Must-show 1-3: one sequence of 8192 tokens; the bias preparation is inside both times."""
    for case, h, g, kind in (
        ("T8192 8/2 local", 8, 2, LOCAL),
        ("T8192 8/1 global", 8, 1, GLOBAL),
        ("T8192 64/16 local", 64, 16, LOCAL),
        ("T8192 64/8 global", 64, 8, GLOBAL),
    ):
        p = make_problem(q_lens=[8192], kv_lens=[8192], heads=h, kv_heads=g, **kind)
        _prefill_case(record, "prefill", case, p)


def ragged(record: Recorder) -> None:
    """16 prompts of 37 to 4096 tokens, half of them on a prefix."""
    q_lens = [37, 64, 100, 129, 200, 333, 512, 700, 900, 1024, 1300, 1700, 2048, 2600, 3333, 4096]
    prefixes = [0, 1000, 0, 4096, 0, 777, 0, 2048, 0, 5000, 0, 64, 0, 1500, 0, 3000]
    kv_lens = [a + b for a, b in zip(q_lens, prefixes, strict=True)]
    for case, g, kind in (("16 prompts 8/2 local", 2, LOCAL), ("16 prompts 8/1 global", 1, GLOBAL)):
        p = make_problem(q_lens=q_lens, kv_lens=kv_lens, heads=8, kv_heads=g, **kind)
        _prefill_case(record, "prefill", case, p, flex=True)


def _workspace(p: Problem) -> DecodeWorkspace:
    h, g = p.q.shape[1], p.k_pages.shape[2]
    return DecodeWorkspace.allocate(
        p.q.device,
        max_requests=len(p.q_lens),
        num_kv_heads=g,
        max_rows=h // g * max(p.q_lens),
        head_dim=p.q.shape[2],
    )


def _decode_case(record: Recorder, op: str, case: str, p: Problem, peer=False) -> None:
    out, work = torch.empty_like(p.q), _workspace(p)
    ours = run_decode(p, out=out, workspace=work).clone()
    record.add(
        op, case, "triton_attn", p, time_graph(lambda: run_decode(p, out=out, workspace=work))
    )
    if peer:
        fn = peer_sglang.decode(p)
        record.add(op, case, "sglang 0.5.23", p, time_graph(fn), difference=_difference(fn(), ours))


def decode(record: Recorder) -> None:
    """Must-show 4. SGLang's projection of the bias is made before the timing."""
    for batch, context, h, g, kind in (
        (1, 8192, 8, 1, GLOBAL), (1, 8192, 8, 2, LOCAL), (32, 8192, 8, 1, GLOBAL), (32, 8192, 8,
        2, LOCAL),
        (128, 8192, 8, 1, GLOBAL), (128, 8192, 8, 2, LOCAL), (8, 131072, 8, 1, GLOBAL), (1, 8192,
        64, 8, GLOBAL),
        (32, 8192, 64, 8, GLOBAL), (32, 8192, 64, 16, LOCAL),
    ):  # fmt: skip
        p = make_problem(q_lens=[1] * batch, kv_lens=[context] * batch, heads=h, kv_heads=g, **kind)
        kind_name = "local" if kind["window"] else "global"
        _decode_case(record, "decode", f"b{batch} c{context} {h}/{g} {kind_name}", p, peer=True)


def verify(record: Recorder) -> None:
    """Must-show 5: q_len 1 is decode, for the ratio."""
    for batch in (1, 32):
        for g, kind in ((1, GLOBAL), (2, LOCAL)):
            for q_len in (1, 2, 4, 9):
                p = make_problem(
                    q_lens=[q_len] * batch, kv_lens=[8192] * batch, heads=8, kv_heads=g, **kind
                )
                kind_name = "local" if kind["window"] else "global"
                _decode_case(record, "verify", f"b{batch} c8192 8/{g} {kind_name} q{q_len}", p)


def context(record: Recorder) -> None:
    """Local decode must not depend on the context length."""
    for batch in (1, 32):
        for length in (1024, 8192, 131072, 1048576):
            p = make_problem(
                q_lens=[1] * batch, kv_lens=[length] * batch, heads=8, kv_heads=2, **LOCAL
            )
            _decode_case(record, "decode", f"b{batch} c{length} 8/2 local", p)


def pages(record: Recorder) -> None:
    for size in (1, 16, 64, 128):
        for case, g, kind in (("8/2 local", 2, LOCAL), ("8/1 global", 1, GLOBAL)):
            p = make_problem(
                q_lens=[8192], kv_lens=[8192], heads=8, kv_heads=g, page_size=size, **kind
            )
            out = torch.empty_like(p.q)
            times = time_stream(lambda p=p, out=out: run_prefill(p, out=out))
            record.add("prefill", f"T8192 {case} page {size}", "triton_attn", p, times)
            p = make_problem(
                q_lens=[1] * 32, kv_lens=[8192] * 32, heads=8, kv_heads=g, page_size=size, **kind
            )
            _decode_case(record, "decode", f"b32 c8192 {case} page {size}", p)


def memory(record: Recorder) -> None:
    """Must-show 6: extra memory of a prefill of 32768 tokens with 64 heads."""
    p = make_problem(q_lens=[32768], kv_lens=[32768], heads=64, kv_heads=8, **GLOBAL)
    out = torch.empty_like(p.q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = time_stream(lambda: run_prefill(p, out=out), repeats=3, warmup=1)
    flush_bytes = 256 * 1024 * 1024
    extra = torch.cuda.max_memory_allocated() - before - flush_bytes
    logits = p.q.shape[0] * p.q.shape[1] * GLOBAL["extent"] * 2
    record.add(
        "prefill",
        "T32768 64/8 global",
        "triton_attn",
        p,
        times,
        extra_bytes=extra,
        logits_bytes=logits,
    )


GROUPS = (prefill, ragged, decode, verify, context, pages, memory)


def main() -> None:
    path, commit, names = sys.argv[1], sys.argv[2], sys.argv[3:]
    failed = [row for row in run_gate() if not row["ok"]] if not names else []
    if failed:
        raise SystemExit(f"the correctness gate failed, nothing is measured: {failed}")
    record = Recorder(path, commit)
    for group in GROUPS:
        if not names or group.__name__ in names:
            group(record)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
