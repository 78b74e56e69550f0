"""Fault injection: one fault at a time in the compiled code of correct kernels.

    python tests/gcn_emulator/faults.py            every kernel, both architectures, Markdown table
    python tests/gcn_emulator/faults.py --verbose  and every survivor

A fault is caught when the emulator raises, reports an LDS race, or the result leaves the budget its
test allows. Only executed instructions are changed. A survivor whose output is bit-identical to the
clean run is listed apart: the fault changed nothing there (a wait for what an earlier one had
covered, a mask whose edge falls on no element of that register).
"""

import argparse
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from score_mods import inputs, reference, row_for, score_mod_attention
from strided_bias import reference as strided_reference
from strided_bias import strided_bias

from gcn_emulator import EmuError, Kernel, triton_driver
from gcn_emulator.triton_driver import emulate

ARCHS = ("gfx942", "gfx950")


@triton.jit
def _softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offs, mask=offs < columns, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * columns + offs, e / tl.sum(e, 0), mask=offs < columns)


@triton.jit
def _rows(address_ptr, x_ptr, y_ptr, count_ptr, columns, BLOCK: tl.constexpr):
    """Every lane loads its pointer: global loads and stores under EXEC instead of buffer loads."""
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    source = tl.load(address_ptr + row + offs * 0).to(tl.pointer_type(tl.float32), bitcast=True)
    x = tl.load(source + offs, mask=offs < columns, other=0.0)
    target = tl.load(address_ptr + 4 + row + offs * 0).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(target + offs, x * 2, mask=offs < columns)
    tl.atomic_add(count_ptr + offs % 4, (x > 0).to(tl.int32), mask=offs < columns)


@triton.jit
def _gemm(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0
        )
        b = tl.load(
            b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0
        )
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _run_softmax(arch):
    torch.manual_seed(0)
    x = torch.randn(3, 461)
    y = torch.full_like(x, float("nan"))
    _softmax[(3,)](x, y, 461, BLOCK=512, num_warps=4)
    return y, x.double().softmax(1), x.softmax(1)


def _run_rows(arch):
    """The columns past a row, and one more row for the counts, must keep what is there."""
    torch.manual_seed(0)
    x, out = torch.randn(4, 205), torch.full((5, 260), 7.0)
    count = torch.zeros(4, dtype=torch.int32)
    addresses = [t[i].data_ptr() for t in (x, out) for i in range(4)]
    _rows[(4,)](torch.tensor(addresses), x, out, count, 205, BLOCK=256, num_warps=2)
    out[4, :4] = count
    want = torch.full((5, 260), 7.0, dtype=torch.float64)
    want[:4, :205] = x * 2
    want[4, :4] = torch.nn.functional.pad((x > 0).sum(0), (0, 3)).reshape(-1, 4).sum(0)
    return out, want, want.float()


def _run_gemm(arch):
    torch.manual_seed(0)
    a, b = torch.randn(70, 88).half(), torch.randn(88, 75).half()
    c = torch.full((70, 75), float("nan"))
    _gemm[(2, 2)](a, b, c, 70, 75, 88, BLOCK=64, BLOCK_K=32, num_warps=4)
    return c, a.double() @ b.double(), a.float() @ b.float()


def _run_gather(arch):
    tensors = inputs(70)
    out = score_mod_attention(*tensors, "gather", row_for(arch))
    exact = reference(*tensors, "gather", torch.float64)
    return out, exact, reference(*tensors, "gather", torch.bfloat16)


def _run_strided_bias(arch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(135, h, 64).to(torch.bfloat16) for h in (2, 1, 1))
    rel = torch.randn(135, 2, 64).to(torch.bfloat16)
    out = strided_bias(q, k, v, rel, window=64)
    exact = strided_reference(q, k, v, rel, 64)
    return out, exact, strided_reference(q, k, v, rel, 64, torch.bfloat16)


KERNELS: dict[str, Callable] = {
    "softmax": _run_softmax,
    "rows": _run_rows,
    "gemm": _run_gemm,
    "gather": _run_gather,
    "strided_bias": _run_strided_bias,
}


def _replace(line: str, pattern: str, text: str) -> str | None:
    new, count = re.subn(pattern, text, line, count=1)
    return new if count else None


def _delete(mnemonic: str) -> Callable[[str], str | None]:
    return lambda line: _replace(line, rf"^\s*{mnemonic}\b.*", "\ts_nop 0")


def _shift_lds(line: str) -> str | None:
    if not re.match(r"\s*ds_(read|write)_(b|u)", line):
        return None
    if (found := re.search(r"offset:(\d+)", line)) is not None:
        return line.replace(found[0], f"offset:{int(found[1]) + 16}")
    code, _, comment = line.partition(";")
    return f"{code.rstrip()} offset:16 ;{comment}"


def _drop_exec(line: str) -> str | None:
    return _replace(
        line, r"s_and_saveexec_b64 (s\[\d+:\d+\]), .*", r"s_or_saveexec_b64 \1, exec"
    )  # EXEC is saved but no lane goes off


def _widen(line: str) -> str | None:
    if not re.match(r"\s*v_cmp_[lg]t_[iu](32|64)", line):
        return None
    return _replace(line, r"v_cmp_([lg])t_", r"v_cmp_\1e_")


def _always(line: str) -> str | None:
    if not re.match(r"\s*v_cmp_[lg][te]_[iu](32|64)", line):
        return None
    return _replace(line, r"v_cmp_[lg][te]_", "v_cmp_t_")


FAULTS: dict[str, Callable[[str], str | None]] = {
    "delete a barrier": _delete("s_barrier"),
    "delete a wait": _delete("s_waitcnt"),
    "shift an LDS offset by 16 bytes": _shift_lds,
    "drop an exec mask": _drop_exec,
    "widen a mask by one (< to <=)": _widen,
    "widen a mask to all lanes": _always,
}


@dataclass(frozen=True)
class Injection:
    """One fault and what became of it: how it was noticed, 'same output' or 'not noticed'."""

    kernel: str
    arch: str
    fault: str
    line: int
    text: str
    outcome: str

    @property
    def caught(self) -> bool:
        return self.outcome not in ("same output", "not noticed")


def _budget(exact, eager, out):
    return 2 * (eager.double() - exact).abs().max() + torch.finfo(out.dtype).eps


def inject(kernel: str, arch: str, fault: str, limit: int, seed: int = 0) -> list[Injection]:
    """Up to `limit` injections of one kind, each alone, at places drawn with `seed`."""
    run = KERNELS[kernel]
    with emulate(arch) as driver:
        clean, exact, eager = run(arch)
        assert (clean.double() - exact).abs().max() <= _budget(exact, eager, clean)
        [key] = {r.key for r in driver.records}
    asm = triton_driver.assembly(key)
    original = triton_driver._KERNELS[key]
    lines = asm.split("\n")
    pairs = zip(original.program.instructions, original.hits, strict=True)
    executed = {inst.line - 1 for inst, count in pairs if count}
    places = [i for i in sorted(executed) if FAULTS[fault](lines[i]) is not None]
    random.Random(seed).shuffle(places)
    found = []
    for at in sorted(places[:limit]):
        broken = [*lines[:at], FAULTS[fault](lines[at]), *lines[at + 1 :]]
        triton_driver._KERNELS[key] = Kernel("\n".join(broken), arch)
        try:
            with emulate(arch):
                out, _, _ = run(arch)
        except EmuError as error:
            outcome = "LDS race" if "LDS race" in str(error) else "error"
        else:
            wrong = not (out.double() - exact).abs().max() <= _budget(exact, eager, out)
            outcome = "wrong result" if wrong else "not noticed"
            if torch.equal(out, clean):
                outcome = "same output"
        finally:
            triton_driver._KERNELS[key] = original
        found.append(
            Injection(kernel, arch, fault, at + 1, lines[at].split(";")[0].strip(), outcome)
        )
    return found


def table(injections: list[Injection]) -> str:
    """Markdown: caught / planted per kind, and by what."""
    rows = [
        "| fault | planted | caught | error | LDS race | wrong result | same output | other |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault in FAULTS:
        mine = [x for x in injections if x.fault == fault]
        kinds = Counter(x.outcome for x in mine)
        columns = ("error", "LDS race", "wrong result", "same output", "not noticed")
        cells = [fault, len(mine), sum(x.caught for x in mine), *(kinds[c] for c in columns)]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=12, help="per kernel, architecture and kind")
    parser.add_argument("--verbose", action="store_true", help="list the survivors")
    args = parser.parse_args()
    injections = [
        injection
        for kernel in KERNELS
        for arch in ARCHS
        for fault in FAULTS
        for injection in inject(kernel, arch, fault, args.limit)
    ]
    print(table(injections))
    for x in injections:
        if args.verbose and not x.caught:
            print(f"{x.outcome}: {x.kernel} {x.arch} line {x.line}: {x.text} ({x.fault})")


if __name__ == "__main__":
    main()
