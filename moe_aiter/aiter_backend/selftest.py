"""The first use of aiter on a machine: its experts and gate against the Triton kernels, in a
subprocess.

A GPU fault ends the process it happens in, so the server asks a child. `run` returns the reason not
to use aiter, or None. The child is this module: `python -m moe_aiter.aiter_backend.selftest
'{...}'`.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from moe_aiter.aiter_backend.calls import AiterExperts, AiterGate
from moe_aiter.aiter_backend.features import Aiter, find_aiter
from moe_aiter.experts import experts
from moe_aiter.gate import gate
from moe_aiter.problems import make_gate_problem, make_problem

# bf16 atomic accumulation of K + S terms: measured against ours by the norm of the difference.
TOLERANCE = 0.02
TOKENS = (1, 3, 64, 300)
SECONDS = 600


def run(facts: dict, command: tuple[str, ...] = ()) -> str | None:
    """Run the child for a rank's shapes and read its verdict.

    Args: facts: experts, top_k, shared, hidden, width of this rank. command: how to start the
        child.
    """
    command = command or (sys.executable, "-m", "moe_aiter.aiter_backend.selftest")
    try:
        child = subprocess.run(
            [*command, json.dumps(facts)], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"aiter's self-test did not end within {SECONDS} s"
    if child.returncode < 0:
        return f"aiter's self-test died of signal {-child.returncode}: {_tail(child.stderr)}"
    if child.returncode:
        return f"aiter's self-test failed: {_tail(child.stderr)}"
    return json.loads(child.stdout.splitlines()[-1])["reason"]


def _tail(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "no message"


def compare(
    aiter: Aiter,
    facts: dict,
    device: torch.device,
    *,
    experts_op=experts,
    gate_op=gate,
    tokens=TOKENS,
) -> str | None:
    """The first difference beyond rounding between aiter and ours, or None.

    experts_op, gate_op: what to compare with; the Triton kernels.
    """
    shape = {name: facts[name] for name in ("experts", "top_k", "shared", "hidden", "width")}
    whole = make_problem(max(tokens), **shape, device=device)
    prepared = AiterExperts.prepare(aiter, **whole.weights)
    for T in tokens:
        routed = (whole.x[:T], whole.ids[:T], whole.gamma[:T])
        ours = experts_op(*routed, **whole.weights).double()
        theirs = prepared(*routed).double()
        error = float((theirs - ours).norm() / ours.norm())
        if not error <= TOLERANCE:
            return f"aiter's experts differ from ours by {error:.2g} at {T} tokens"
    if not aiter.gate_with_sinks:
        return None
    for T in tokens:
        p = make_gate_problem(
            T,
            experts=facts["experts"],
            shared=facts["shared"],
            hidden=facts["hidden"],
            device=device,
        )
        arguments = (p.weight, p.bias, p.global_scale)
        scale = {"top_k": facts["top_k"], "route_scale": 8.0}
        ids, weights = AiterGate.prepare(aiter, *arguments, **scale)(p.x)
        our_ids, ours = gate_op(p.x, *arguments, **scale)
        # Scores closer than rounding may swap places; the weights of the same place stay close.
        same = float((ids == our_ids).float().mean())
        off = float((weights - ours).abs().max())
        if same < 0.99 or not off <= 1e-2:
            return f"aiter's gate agrees on {same:.1%} of ids and is off by {off:.2g} at {T} tokens"
    return None


def main() -> None:
    """The child: print {"reason": null or why not}."""
    aiter = find_aiter()
    if isinstance(aiter, str):
        reason: str | None = aiter
    else:
        reason = compare(aiter, json.loads(sys.argv[1]), torch.device("cuda"))
        torch.cuda.synchronize()
    print(json.dumps({"reason": reason}))


if __name__ == "__main__":
    main()
