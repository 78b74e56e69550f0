"""Decoded programs on disk, so that the next process need not parse the same assembly again.

A file holds the parsed program and the register sets of its instructions (the closures that
execute them are built from it when first reached). Its name is a hash of the assembly and of the
sources that decide the contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import tempfile
from functools import cache
from pathlib import Path

from gcn_emulator.formats import EmuError
from gcn_emulator.parser import Instruction, KernelArg, Program, parse_program
from gcn_emulator.registers import register_sets

RegisterSets = list[tuple[int, int]]


def cache_directory() -> Path:
    """The user's cache directory for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gcn_emulator"


@cache
def _fingerprint() -> bytes:
    """Changes whenever the code that produces the contents does."""
    digest = hashlib.sha256()
    for name in ("parser.py", "operands.py", "registers.py", "cache.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.digest()


def load_program(asm: str, directory: Path | None = None) -> tuple[Program, RegisterSets]:
    """The parsed program and what each instruction (reads, writes), from the cache if it is there.

    A cache that cannot be read or written is ignored: it only saves time.
    """
    key = hashlib.sha256(_fingerprint() + asm.encode()).hexdigest()
    path = (directory or cache_directory()) / f"{key}.bin"
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        return _unpack(marshal.loads(path.read_bytes()))
    program = parse_program(asm)
    sets = [_sets(inst) for inst in program.instructions]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(marshal.dumps(_pack(program, sets)))
        os.replace(temporary, path)
    return program, sets


def _sets(inst: Instruction) -> tuple[int, int]:
    """Register sets; an operand nobody understands is reported when the instruction is reached."""
    try:
        return register_sets(inst)
    except EmuError:
        return 0, 0


def _pack(program: Program, sets: RegisterSets) -> tuple:
    instructions = [
        (i.mnemonic, i.operands, i.modifiers, i.rest, i.line, i.source)
        for i in program.instructions
    ]
    args = [(a.offset, a.size, a.kind) for a in program.args]
    return (
        program.name, instructions, program.labels, program.descriptor, args, program.metadata, sets
    )  # fmt: skip


def _unpack(packed: tuple) -> tuple[Program, RegisterSets]:
    name, instructions, labels, descriptor, args, metadata, sets = packed
    program = Program(
        name, [Instruction(*i) for i in instructions], labels, descriptor,
        [KernelArg(*a) for a in args], metadata,
    )  # fmt: skip
    return program, sets
