"""Runs generated kernels on emulator(gfx942), emulator(gfx950) and Triton's interpreter.

python differential.py FIRST LAST          compare all three, print failures and a summary
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from kernelgen import HEADER, generate  # noqa: E402


def make_args(case, seed):
    import torch

    gen = torch.Generator().manual_seed(seed)
    kinds = {
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "i32": torch.int32,
        "i16": torch.int16,
        "i8": torch.int8,
        "i64": torch.int64,
    }
    out = []
    for spec in case.args:
        if isinstance(spec, int):
            out.append(spec)
            continue
        dtype, size, low, high = spec
        if dtype in ("f32", "f16", "bf16"):
            x = torch.randint(low * 4, high * 4, (size,), generator=gen) / 4
        else:
            x = torch.randint(low, high, (size,), generator=gen)
        out.append(x.to(kinds[dtype]))
    return out


def load_module(cases, folder):
    path = Path(folder) / "generated.py"
    if not path.exists():
        path.write_text(HEADER + "\n\n".join(c.source for c in cases))
    spec = importlib.util.spec_from_file_location("generated", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worker(mode, first, last, folder):
    """Run every case in one mode and save the outputs."""
    import contextlib

    import torch
    from triton.errors import TritonError

    seeds = range(first, last)
    cases = [generate(s) for s in seeds]
    module = load_module(cases, folder)
    results, mnemonics = {}, Counter()
    for seed, case in zip(seeds, cases, strict=True):
        args = make_args(case, seed)
        options = case.options if mode != "interpret" else {}
        context = contextlib.nullcontext()
        if mode != "interpret":
            from gcn_emulator.triton_driver import emulate

            context = emulate(mode, counters=True)
        try:
            with context as driver:
                getattr(module, case.name)[case.grid](*args, **case.consts, **options)
                if driver:
                    for record in driver.records:
                        mnemonics.update(record.counters.instructions)
            results[seed] = [args[i] for i in case.outputs]
        except (RuntimeError, TritonError) as error:  # of the emulator and the compiler
            results[seed] = f"{type(error).__name__}: {str(error)[-300:]}"
    torch.save((results, dict(mnemonics)), Path(folder) / f"{mode}.pt")


def same(got, want, tolerance):
    import torch

    if got.dtype.is_floating_point:
        return torch.allclose(
            got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    return torch.equal(got, want)


def compare(first, last, modes=("interpret", "gfx942", "gfx950")):
    """-> (kernels, {seed: problem}, executed mnemonics, launches that exceeded LDS)."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        load_text = [generate(s) for s in range(first, last)]
        (Path(folder) / "generated.py").write_text(
            HEADER + "\n\n".join(c.source for c in load_text)
        )
        running = []
        for mode in modes:
            env = dict(os.environ, TRITON_INTERPRET="1" if mode == "interpret" else "0")
            env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

            command = [sys.executable, __file__, "--worker", mode, str(first), str(last), folder]
            running.append(subprocess.Popen(command, env=env))
        for process in running:
            if process.wait():
                raise RuntimeError(f"worker failed: {process.args}")
        data = {m: torch.load(Path(folder) / f"{m}.pt") for m in modes}
    problems, mnemonics, skipped = {}, Counter(), 0
    for mode in modes[1:]:
        mnemonics.update(data[mode][1])
    for seed in range(first, last):
        want = data["interpret"][0][seed]
        case = generate(seed)
        # a kernel that needs more LDS than gfx942 has is not a failure
        fits = [m for m in modes if "OutOfResources" not in str(data[m][0][seed])[:20]]
        skipped += len(modes) - len(fits)
        for mode in fits:
            if isinstance(data[mode][0][seed], str):
                problems[seed] = f"{case.name} {mode}: {data[mode][0][seed]}"
                break
        else:
            for mode in fits[1:]:
                for got, ref in zip(data[mode][0][seed], want, strict=True):
                    if not same(got, ref, case.tolerance):
                        worst = (got.double() - ref.double()).abs().max().item()
                        problems[seed] = f"{case.name} {mode}: wrong, largest difference {worst}"
    return last - first, problems, mnemonics, skipped


def main():
    if sys.argv[1] == "--worker":
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        return
    start = time.time()
    count, problems, mnemonics, skipped = compare(int(sys.argv[1]), int(sys.argv[2]))
    for seed, text in problems.items():
        print(seed, text)
    print(
        f"{count} kernels, {len(problems)} problems, {skipped} did not fit, "
        f"{len(mnemonics)} mnemonics, {time.time() - start:.0f} s"
    )
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_text("\n".join(sorted(mnemonics)))


if __name__ == "__main__":
    main()
