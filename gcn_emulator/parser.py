"""AMDGCN assembly text -> instructions, labels, kernel descriptor and metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gcn_emulator.formats import EmuError


@dataclass(slots=True)
class Instruction:
    """One machine instruction with its operands and modifiers still as text.

    `line` is its line in the assembly, `source` the Python line it comes from ("" if unknown).
    """

    mnemonic: str
    operands: list[str]
    modifiers: dict[str, str]
    rest: str
    line: int
    source: str = ""

    def __str__(self) -> str:
        return f"{self.mnemonic} {self.rest}".strip()

    def int_modifier(self, name: str, default: int = 0) -> int:
        """Integer value of a modifier such as offset:16."""
        return int(self.modifiers.get(name, str(default)), 0)

    def list_modifier(self, name: str, length: int, default: int) -> list[int]:
        """List value of a modifier such as op_sel:[0,1], padded to `length`."""
        text = self.modifiers.get(name)
        values = [int(v) for v in text.strip("[]").split(",")] if text else []
        return values + [default] * (length - len(values))


@dataclass(slots=True)
class KernelArg:
    """One entry of the kernel argument buffer."""

    offset: int
    size: int
    kind: str


@dataclass
class Program:
    """A parsed kernel."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]
    descriptor: dict[str, int]
    args: list[KernelArg]
    metadata: dict[str, int] = field(default_factory=dict)


def split_operands(rest: str) -> tuple[list[str], dict[str, str]]:
    """Split 'v0, |v1|, s[0:1] offset:4 clamp' into operands and modifiers."""
    rest = re.sub(r"\(([^)]*)\)", lambda m: "(" + re.sub(r"\s", "", m[1]) + ")", rest)
    operands: list[str] = []
    current, depth = "", 0
    for ch in rest:
        if ch in "[(":
            depth += 1
        elif ch in "])":
            depth -= 1
        if ch == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += ch
    if current.strip():
        operands.append(current.strip())
    modifiers: dict[str, str] = {}
    if operands:
        first, *tail = operands[-1].split()
        operands[-1] = first
        for token in tail:
            key, _, value = token.partition(":")
            modifiers[key] = value or "1"
    return operands, modifiers


# Addresses of instructions are made up: the assembly does not say how long their encodings are.
INSTRUCTION_BYTES = 4
_LABEL_DISTANCE = re.compile(r"\(([.\w$]+)-([.\w$]+)\)(&4294967295|>>32)")


def _label_distance(operand: str, labels: dict[str, int]) -> str:
    """'(.LBB0_4-.Lpost_getpc1)&4294967295' of a long branch -> a number; others unchanged."""
    match = _LABEL_DISTANCE.fullmatch(operand)
    if not match or match[1] not in labels or match[2] not in labels:
        return operand
    distance = INSTRUCTION_BYTES * (labels[match[1]] - labels[match[2]])
    return str((distance if match[3][0] == "&" else distance >> 32) & 0xFFFFFFFF)


_LOCATION = re.compile(r"\s*(\S+\.py:[1-9]\d*)")  # "kernel.py:17:4" of a .loc directive's comment


def _parse_metadata(asm: str) -> tuple[list[KernelArg], dict[str, int]]:
    start = asm.index("amdhsa.kernels:")
    text = asm[start:]
    block = text[: text.index(".group_segment_fixed_size")]
    args = []
    for part in re.split(r"\n\s+- ", block.split(".args:", 1)[1] if ".args:" in block else "")[1:]:
        entry = dict(re.findall(r"\.(\w+):\s+(\S+)", part))
        if "offset" in entry:
            kind = entry.get("value_kind", "by_value")
            args.append(KernelArg(int(entry["offset"]), int(entry["size"]), kind))
    metadata = {k: int(v) for k, v in re.findall(r"\n {4}\.(\w+): +(\d+)(?=\n)", text)}
    return args, metadata


def parse_program(asm: str) -> Program:
    """Parse one kernel as emitted by Triton (`compiled.asm["amdgcn"]`)."""
    body = asm[: asm.index(".amdhsa_kernel")] if ".amdhsa_kernel" in asm else asm
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for number, raw in enumerate(body.splitlines(), 1):
        text, _, comment = raw.partition(";")
        text = text.split("//")[0].strip()
        if text.startswith(".loc") and (place := _LOCATION.match(comment)):
            source = place[1]
        label = re.match(r"([.\w$]+):", text)
        if label:
            labels[label[1]] = len(instructions)
            text = text[label.end() :].strip()
        if not text or text.startswith("."):
            continue
        match = re.fullmatch(r"([a-z]\w+)\s*(.*)", text)
        if not match:
            raise EmuError(f"line {number}: cannot parse {raw.strip()!r}")
        operands, modifiers = split_operands(match[2])
        instructions.append(Instruction(match[1], operands, modifiers, match[2], number, source))
    for inst in instructions:
        if inst.mnemonic in ("s_add_u32", "s_addc_u32"):
            inst.operands = [_label_distance(o, labels) for o in inst.operands]
    descriptor = {k: int(v) for k, v in re.findall(r"\.amdhsa_(\w+) (\d+)\s", asm)}
    args, metadata = _parse_metadata(asm) if "amdhsa.kernels:" in asm else ([], {})
    name = re.search(r"\.amdhsa_kernel (\S+)", asm)
    return Program(name[1] if name else "?", instructions, labels, descriptor, args, metadata)
