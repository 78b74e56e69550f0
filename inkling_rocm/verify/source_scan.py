"""Which `@triton.jit` functions in the source tree are kernels that no entry names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kernel_base.register import KernelEntry

PACKAGES = ("kernel_base", "inkling_rocm", "triton_attn", "moe_aiter")


@dataclass(frozen=True)
class JitFunction:
    """One `@triton.jit` or `@gluon.jit` function: "module:name", the names in its body.

    `nvidia_only`: its module imports Gluon's NVIDIA instructions or descriptors, or it calls one of
    Triton's instructions behind no condition.
    """

    path: str
    name: str
    mentions: frozenset[str]
    returns_value: bool
    nvidia_only: bool


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(target, ast.Attribute):
        return target.attr == "jit"
    return isinstance(target, ast.Name) and target.id == "jit"


def _mentioned(function: ast.FunctionDef) -> Iterator[str]:
    """Names a jit function calls or hands on (to tl.reduce, to warp_specialize, ...)."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id != function.name:
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _imports_nvidia(node: ast.AST) -> bool:
    prefixes = ("triton.experimental.gluon.language.nvidia", "triton.experimental.gluon.nvidia")
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith(prefixes)
    return isinstance(node, ast.Import) and any(a.name.startswith(prefixes) for a in node.names)


def _nvidia_instructions(tree: ast.Module) -> set[str]:
    """Names that a module imports of Triton's library for NVIDIA GPUs."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "triton.language.extra.cuda"
        for alias in node.names
    }


def _always_calls(function: ast.FunctionDef, names: set[str]) -> bool:
    """Whether a statement of the function's own body, behind no condition, calls one of `names`."""
    calls = (s.value for s in function.body if isinstance(s, ast.Expr))
    called = (call.func for call in calls if isinstance(call, ast.Call))
    return any(isinstance(name, ast.Name) and name.id in names for name in called)


def jit_functions(source: str, module: str) -> list[JitFunction]:
    """The jit functions of one module's source text."""
    found = []
    tree = ast.parse(source)
    gluon = any(_imports_nvidia(node) for node in ast.walk(tree))
    instructions = _nvidia_instructions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_is_jit(d) for d in node.decorator_list):
            returns = any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(node))
            path, mentioned = f"{module}:{node.name}", frozenset(_mentioned(node))
            nvidia_only = gluon or _always_calls(node, instructions)
            found.append(JitFunction(path, node.name, mentioned, returns, nvidia_only))
    return found


def package_jit_functions() -> list[JitFunction]:
    """The jit functions of this project's packages, from their sources."""
    found = []
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"package {package!r} is not installed: nothing to scan")
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found += jit_functions(path.read_text(), module)
    return found


def unregistered(functions: Iterable[JitFunction], entries: Iterable[KernelEntry]) -> list[str]:
    """Kernels that no entry names, as "module:function".

    A function another jit function calls or hands on is a helper, and so is one that returns a
    value: a kernel cannot.
    """
    functions = list(functions)
    named = {kernel for entry in entries for kernel in entry.kernels}
    mentioned = {name for f in functions for name in f.mentions}
    return sorted(
        f.path
        for f in functions
        if f.path not in named and f.name not in mentioned and not f.returns_value
    )


def missing_kernels(functions: Iterable[JitFunction], entries: Iterable[KernelEntry]) -> list[str]:
    """Kernels an entry names that do not exist, as "entry: module:function"."""
    there = {f.path for f in functions}
    return [f"{e.name}: {k}" for e in entries for k in e.kernels if k not in there]
