"""Kernels are compiled before their first launch, and nothing runs meanwhile but other threads'."""

import threading
import time

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from gcn_emulator.triton_driver import emulate  # noqa: E402
from inkling_rocm.engine.compile_ahead import (  # noqa: E402
    COMPUTED_FROM,
    compiling_ahead,
    may_compile_ahead,
)
from inkling_rocm.engine.device_round_sampler import DeviceRoundSampler  # noqa: E402
from inkling_rocm.engine.device_sampler import DeviceSampler  # noqa: E402
from inkling_rocm.ops.registry import Choice, OpSet  # noqa: E402
from tests.kernels.sampling_cases import PARAMS, make_rows  # noqa: E402

CPU, VOCABULARY = torch.device("cpu"), 1000


@triton.jit
def _add_kernel(out_ptr, x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(out_ptr + offs, x + n, mask=offs < n)


@triton.jit
def _wrong_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), undefined)  # noqa: F821


def add(n: int, block: int = 64) -> torch.Tensor:
    out = torch.full((n,), torch.nan)
    _add_kernel[(1,)](out, torch.arange(n, dtype=torch.float32), n, BLOCK=block)
    return out


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels compiled or read from the disk, each with its thread."""
    found = []
    monkeypatch.setattr(
        triton.knobs.compilation,
        "listener",
        lambda *, src, **_: found.append((src.name, threading.current_thread())),
    )
    return found


def test_kernels_are_parsed_one_at_a_time(monkeypatch, tmp_path):
    """Python before 3.11.8 fails now and then where threads parse at one time."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    parser = next(c for c in type(_add_kernel).__mro__ if "parse" in vars(c))
    parse, inside, most = parser.parse, [], []

    def slowly(self):
        inside.append(self)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return parse(self)

    monkeypatch.setattr(parser, "parse", slowly)
    kernel, x = triton.jit(_add_kernel.fn), torch.zeros(5)
    with emulate("gfx950"), compiling_ahead(progress=False):
        for block in (64, 128, 256, 512):
            kernel[(1,)](x, x, 5, BLOCK=block)
    assert parser.parse is slowly
    assert max(most) == 1
    assert len(most) >= 4


def test_launches_only_compile(compiled):
    with emulate("gfx950"):
        with compiling_ahead(progress=False):
            outs = [add(5), add(16), add(16), add(5, block=128)]
        assert all(out.isnan().all() for out in outs), "a kernel ran"
        assert [name for name, _ in compiled] == ["_add_kernel"] * 3
        assert threading.current_thread() not in {thread for _, thread in compiled}
        compiled.clear()
        for out, n in ((add(5), 5), (add(16), 16), (add(5, block=128), 5)):
            assert out.tolist() == [n + i for i in range(n)]
        assert compiled == [], "a launch had to compile"


def test_what_launches_them_is_made_too(monkeypatch):
    made = []
    with emulate("gfx950") as driver:
        launcher = driver.launcher_cls

        def make(src, metadata):
            made.append((metadata.name, threading.current_thread()))
            return launcher(src, metadata)

        monkeypatch.setattr(driver, "launcher_cls", make)
        with compiling_ahead(progress=False):
            add(11, block=32)
    ((name, thread),) = made
    assert name == "_add_kernel"
    assert thread is not threading.current_thread()


def test_other_threads_launch():
    found = []
    with emulate("gfx950"):
        with compiling_ahead(progress=False):
            other = threading.Thread(target=lambda: found.append(add(7)))
            other.start()
            other.join()
        assert found[0].tolist() == [7 + i for i in range(7)]


def test_launches_run_again_after_an_error():
    def fail():
        with compiling_ahead(progress=False):
            add(9)
            raise ZeroDivisionError

    with emulate("gfx950"):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert add(9).tolist() == [9 + i for i in range(9)]


def test_launches_run_again_after_a_kernel_that_does_not_compile():
    """Triton 3.6 leaves its mode on then: later kernels would go to threads that have ended."""

    def fail():
        with compiling_ahead(progress=False):
            _wrong_kernel[(1,)](torch.zeros(4), BLOCK=4)

    with emulate("gfx950"):
        with pytest.raises(triton.CompilationError):
            fail()
        assert add(13).tolist() == [13 + i for i in range(13)]
        with compiling_ahead(progress=False):
            add(14, block=32)


def test_threads_that_compile_ahead_take_turns():
    """Engines may be built side by side: what the first one's thread launches after its turn runs,
    both during the second one's turn and after it."""
    found = []
    waits, in_turn, finish = (threading.Event() for _ in range(3))

    def second():
        waits.set()
        with compiling_ahead(progress=False):
            in_turn.set()
            finish.wait(60)
        found.append(add(3))

    other = threading.Thread(target=second)
    with emulate("gfx950"):
        with compiling_ahead(progress=False):
            other.start()
            waits.wait(60)
            time.sleep(0.2)  # it has come to wait for its turn
        in_turn.wait(60)
        found.append(add(5))
        finish.set()
        other.join()
        found.append(add(6))
    assert [out.tolist() for out in found] == [[n + i for i in range(n)] for n in (5, 3, 6)]


def test_ops_that_would_follow_unwritten_indices():
    def ops(variant: str) -> OpSet:
        choices = [Choice(op=op, variant="triton", refused={}) for op in COMPUTED_FROM[:-1]]
        choices.append(Choice(op=COMPUTED_FROM[-1], variant=variant, refused={}))
        choices.append(Choice(op="linear", variant="torch", refused={}))
        return type("Ops", (), {"choices": choices})()

    assert may_compile_ahead(ops("triton"))
    assert not may_compile_ahead(ops("torch"))
    assert not may_compile_ahead(ops("aiter"))


def test_a_sampler_has_what_any_request_asks_for(compiled):
    rows = make_rows(6, VOCABULARY, params=PARAMS[-6:])
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(0))
    with emulate("gfx950"):
        slots = list(range(1, len(rows) + 1))
        sampler = DeviceSampler(
            vocabulary=VOCABULARY, slots=len(rows) + 1, device=CPU, arch="gfx950"
        )
        with compiling_ahead(progress=False):
            sampler.compile(logits)
        assert len(compiled) >= 12
        compiled.clear()
        sampler.sample(logits, rows, slots)
        sampler.sample(logits[:1], rows[:1], slots[:1])
        draws = DeviceRoundSampler(sampler, rejection=False)
        draws.draw(logits[:3].clone(), torch.zeros(3, dtype=torch.int64))
    assert compiled == []
