"""Choosing variants: refusals carry their reason, nothing falls back silently."""

from __future__ import annotations

import pytest

from inkling_rocm.config import load_config
from inkling_rocm.ops import OP_NAMES, registry, resolve_ops
from inkling_rocm.ops.registry import OpContext, Variant
from kernel_base.arch import arch_named


@pytest.fixture
def config(small_config_path):
    return load_config(small_config_path)


def test_every_op_has_a_torch_reference(config):
    context = OpContext(config=config, arch=arch_named("cpu"), dtype="float32", tp_size=1)
    for op in OP_NAMES:
        last = registry.variants_of(op)[-1]
        assert last.name == "torch"
        assert last.supports(context) is None
        assert callable(last.load(context))


def test_unknown_backend_lists_the_choices(config):
    with pytest.raises(ValueError, match=r"--attention-backend fa9.*choose from auto, .*torch"):
        resolve_ops(config, arch_named("cpu"), attention_backend="fa9")


def test_a_backend_that_cannot_run_says_why(config, monkeypatch):
    never = Variant(name="never", function="math:sqrt", supports=lambda context: "needs a moon")
    torch_variant = registry.variants_of("experts")[-1]
    monkeypatch.setattr("inkling_rocm.ops.experts.VARIANTS", (never, torch_variant))
    with pytest.raises(ValueError, match=r"--moe-runner-backend never cannot run.*needs a moon"):
        registry.choose("experts", _context(config), "never")
    variant, choice = registry.choose("experts", _context(config))
    assert variant.name == "torch"
    assert choice.refused == {"never": "needs a moon"}


def test_no_variant_at_all_is_an_error(config, monkeypatch):
    never = Variant(name="never", function="math:sqrt", supports=lambda context: "needs a moon")
    monkeypatch.setattr("inkling_rocm.ops.linear.VARIANTS", (never,))
    with pytest.raises(ValueError, match=r"no variant of linear can run.*needs a moon"):
        resolve_ops(config, arch_named("cpu"))


def _context(config):
    return OpContext(config=config, arch=arch_named("cpu"), dtype="float32", tp_size=1)
