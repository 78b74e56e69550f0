"""Measure gate and experts on this GPU: correctness first, then medians in captured graphs.

    python -m bench.moe.run --out rows.jsonl [--peer DIR] [--what experts layer ...]
        [--model ...]

DIR holds SGLang's kernels laid out importable (docs/moe.md); without it the peer's rows are
missing. Rows are appended as JSON; a case whose kernel failed its gate has no times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from bench.moe import peer_sglang
from bench.moe.gate import layer_passes, small_cases
from bench.moe.launches import launches_alone
from bench.moe.problems import (
    EXPERTS,
    MODELS,
    ROUTINGS,
    SHARED,
    TOP_K,
    Layer,
    make_layer,
    make_weights,
)
from bench.moe.timing import ceilings, count_launches, time_calls
from bench.rows import Rows
from kernel_base.arch import arch_of_device
from moe_aiter import GateWorkspace, dense_mlp, experts, gate
from moe_aiter.problems import Problem, make_gate_problem
from moe_aiter.reference import gate_reference

EXPERT_TOKENS = (1, 4, 32, 128, 1024, 8192)
LAYER_TOKENS = (1, 4, 32, 1024, 8192)
SUSTAINED_FROM = 8192  # tokens: enough work to meet a GPU's power limit
UNEVEN_TOKENS = (8192,)  # also with some experts' rows many times others'
GATE_TOKENS = (1, 8, 32, 128, 512, 4096, 16384)
GATE_COPIES = 36  # of the router's weights: 114 MB of Inkling's, 76 of Small's
DENSE_TOKENS = (1, 16, 1024, 8192)
ROUTE_SCALE = 8.0


def ours(call: Problem) -> torch.Tensor:
    return experts(call.x, call.ids, call.gamma, **call.weights)


def measure_layer(
    rows: Rows, op: str, layer: Layer, run: Callable[[Problem], torch.Tensor], floor_us: float
) -> None:
    ok, error, eager = layer_passes(run, layer)
    outcome = "pass" if ok else f"fail: error {error:.2g}, eager {eager:.2g}"
    found: dict = {}
    if ok:
        found = time_calls(
            lambda i: run(layer.calls[i % ROUTINGS]), ROUTINGS, steady=True,
            sustained=layer.tokens >= SUSTAINED_FROM,
        )  # fmt: skip
        found["launches"] = count_launches(lambda: run(layer.calls[0]))
        found["floor_us"] = round(floor_us, 2)
        found["times_floor"] = round(found["p50_us"] / floor_us, 3)
        found["hit_experts"] = round(layer.hit_experts(), 1)
        found["error"], found["eager_error"] = round(error, 6), round(eager, 6)
    rows.add(op, layer.name, outcome, **found)


def _cases(tokens: tuple[int, ...], only: list[int] | None) -> list[tuple[int, bool]]:
    """(tokens, whether some experts get many more of them than others)."""
    cases = [(count, False) for count in tokens] + [(count, True) for count in UNEVEN_TOKENS]
    return [case for case in cases if only is None or case[0] in only]


def routed_alone(
    rows: Rows,
    model: str,
    peer: bool,
    bytes_per_s: float,
    flops: float,
    only: list[int] | None = None,
) -> None:
    weights = make_weights(model)
    interleaved = peer_sglang.interleave(weights["w13"]) if peer else None
    for tokens, skewed in _cases(EXPERT_TOKENS, only):
        layer = make_layer(model, tokens, weights, shared=0, skewed=skewed)
        floor = layer.floor_us(bytes_per_s, flops)
        measure_layer(rows, "moe.experts", layer, ours, floor)
        if interleaved is not None:
            theirs = peer_sglang.experts(interleaved, weights["w2"])
            measure_layer(rows, "moe.experts/sglang", layer, theirs, floor)
        torch.cuda.empty_cache()


def whole_layer(
    rows: Rows, model: str, bytes_per_s: float, flops: float, only: list[int] | None = None
) -> None:
    """Gate, routed and shared experts in one timing. The gate's own choices are not used: the
    routings
    are fixed, so that the experts' bytes are those of the rows above."""
    weights = make_weights(model)
    for tokens, skewed in _cases(LAYER_TOKENS, only):
        layer = make_layer(model, tokens, weights, shared=SHARED, skewed=skewed)
        gates = {
            id(call): make_gate_problem(
                tokens, experts=256, hidden=MODELS[model][0], device="cuda", seed=seed
            )
            for seed, call in enumerate(layer.calls)
        }
        workspace = GateWorkspace.allocate(layer.calls[0].x.device)

        def run(call, gates=gates, workspace=workspace):
            p = gates[id(call)]
            gate(
                p.x, p.weight, p.bias, p.global_scale, top_k=TOP_K, route_scale=ROUTE_SCALE,
                workspace=workspace,
            )  # fmt: skip
            return ours(call)

        gate_floor = (EXPERTS + SHARED) * MODELS[model][0] * 2 / bytes_per_s * 1e6
        floor = layer.floor_us(bytes_per_s, flops, shared=SHARED) + gate_floor
        measure_layer(rows, "moe.layer", layer, run, floor)
        torch.cuda.empty_cache()


def unfused_gate(p, weight, bias) -> tuple[torch.Tensor, torch.Tensor]:
    """The chain of torch operations a fused gate replaces, fp32 as the model wants it."""
    logits = F.linear(p.x.float(), weight)
    ids = (logits[:, :256].sigmoid() + bias).topk(TOP_K, dim=-1).indices
    chosen = torch.cat((logits.gather(-1, ids), logits[:, 256:]), dim=-1)
    return ids.int(), F.logsigmoid(chosen).softmax(-1) * (ROUTE_SCALE * p.global_scale)


def gate_alone(rows: Rows, model: str) -> None:
    """Weights come from memory: calls rotate over more copies than the L2 holds."""
    for tokens in GATE_TOKENS:
        p = make_gate_problem(tokens, experts=256, hidden=MODELS[model][0], device="cuda")
        copies = [(p.weight.clone(), p.bias.clone()) for _ in range(GATE_COPIES)]
        wide = [(weight.float(), bias) for weight, bias in copies]
        workspace, fixed = GateWorkspace.allocate(p.x.device), {"top_k": TOP_K, "route_scale": 8.0}

        def fused(i=0, p=p, copies=copies, fixed=fixed, workspace=workspace):
            return gate(p.x, *copies[i], p.global_scale, **fixed, workspace=workspace)

        def chain(i=0, p=p, wide=wide):
            return unfused_gate(p, *wide[i])

        ids, gamma = fused()
        want_ids, want = gate_reference(p.x, p.weight, p.bias, p.global_scale, **fixed)
        # Scores closer than fp32 rounding of a 6144-term sum may swap places.
        same = float((ids == want_ids).float().mean())
        ok = same > 0.999 and bool((gamma.double() - want).abs().median() < 1e-4)
        found: dict = {}
        if ok:
            found = time_calls(fused, GATE_COPIES, steady=True)
            found |= {"copies": GATE_COPIES, "launches": count_launches(fused)}
            found["torch_p50_us"] = time_calls(chain, GATE_COPIES, steady=True)["p50_us"]
            found["speedup"] = round(found["torch_p50_us"] / found["p50_us"], 2)
        rows.add(
            "moe.gate", f"{model} T={tokens}", "pass" if ok else f"fail: {same:.4f} same", **found
        )
        torch.cuda.empty_cache()


def dense(rows: Rows, model: str) -> None:
    hidden, width = MODELS[model]
    width *= 8  # the dense layers are eight experts wide
    generator = torch.Generator("cuda").manual_seed(0)

    def weight(*shape):
        draw = torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)
        return draw * shape[-1] ** -0.5

    up, down = weight(2 * width, hidden), weight(hidden, width)
    scale = torch.ones(1, device="cuda")
    for tokens in DENSE_TOKENS:
        x = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()

        def chain(_=0, x=x):
            g, u = F.linear(x, up).chunk(2, dim=-1)
            return F.linear(F.silu(g) * u, down) * scale.bfloat16()

        def fused(_=0, x=x):
            return dense_mlp(x, up, down, scale)

        error = float((fused() - chain()).float().norm() / chain().float().norm())
        found = {}
        if error < 0.02:
            found = time_calls(fused, 4, steady=True)
            found["torch_p50_us"] = time_calls(chain, 4, steady=True)["p50_us"]
            found["speedup"] = round(found["torch_p50_us"] / found["p50_us"], 2)
        outcome = "pass" if error < 0.02 else f"fail: error {error:.2g}"
        rows.add("moe.dense_mlp", f"{model} T={tokens}", outcome, **found)


def small_gate(rows: Rows) -> Iterator[str]:
    """Names of failed small cases."""
    failed = [(n, e, b) for n, ok, e, b in small_cases() if not ok]
    total = "pass" if not failed else f"fail: {len(failed)}"
    rows.add(
        "moe.small_cases",
        "all",
        total,
        failed=[f"{n}: {e:.2g} > 2 x {b:.2g}" for n, e, b in failed],
    )
    yield from (n for n, _, _ in failed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--peer", help="folder on which `import sglang.kernels` works")
    parser.add_argument(
        "--what", nargs="+", default=["small", "experts", "launches", "layer", "gate", "dense"]
    )
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, help="experts and layer of these alone")
    options = parser.parse_args()
    if options.peer:
        sys.path.insert(0, options.peer)
    rows = Rows(
        options.out, device=torch.cuda.get_device_name(), arch=arch_of_device("cuda:0").name
    )
    failed = list(small_gate(rows)) if "small" in options.what else []
    bytes_per_s, flops = ceilings()
    rows.add("ceilings", "this device", "none", bytes_per_s=bytes_per_s, flops=flops)
    for model in options.model:
        if "experts" in options.what:
            routed_alone(rows, model, bool(options.peer), bytes_per_s, flops, options.tokens)
        if "launches" in options.what:
            launches_alone(rows, model)
        if "layer" in options.what:
            whole_layer(rows, model, bytes_per_s, flops, options.tokens)
        if "gate" in options.what:
            gate_alone(rows, model)
        if "dense" in options.what:
            dense(rows, model)
    if failed:
        sys.exit(f"{len(failed)} small cases failed: {failed[:5]}")


if __name__ == "__main__":
    main()
