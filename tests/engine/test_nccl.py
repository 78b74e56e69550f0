"""Two ranks on two GPUs (NCCL, collectives inside graphs) give the tokens of one rank."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from tests.engine.test_tensor_parallel import GREEDY, PROMPTS, answers, engine, folder

__all__ = ["folder"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PAIR = {"device": "cuda", "tp_size": 2, "dist_timeout": 120, "max_total_tokens": 1024}
SPECULATION = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2}


@pytest.fixture(scope="module")
def alone(folder):
    with engine(folder, max_total_tokens=1024) as running:
        return answers(running), running.prompt_logits(PROMPTS[1])


def closed(running) -> None:
    """End an engine; graphs and NCCL's communicator are left in order, so nothing waits."""
    processes, begin = running._ranks._processes, time.monotonic()
    running.shutdown()
    assert time.monotonic() - begin < 8, "leaving the group took long"
    assert [process.poll() for process in processes] == [0] * len(processes)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("ep", [1, 2])
def test_graphs(folder, alone, ep):
    """The batch grows and shrinks over its buckets, prompts come in chunks, continuations fork."""
    running = engine(folder, ep_size=ep, **PAIR)
    try:
        runner = running._core.executor._local.decode
        assert runner is not None, "decode was not captured"
        assert len(runner.graphs) == len(runner.buckets)
        first = answers(running)
        logits = running.prompt_logits(PROMPTS[1])
        again = answers(running)
    finally:
        closed(running)
    assert first[: len(PROMPTS)] == alone[0][: len(PROMPTS)]  # greedy
    assert first == alone[0]
    assert again == first
    torch.testing.assert_close(logits, alone[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ep", [1, 2])
def test_kernel_by_kernel(folder, alone, ep):
    with engine(folder, ep_size=ep, disable_cuda_graph=True, **PAIR) as running:
        assert running._core.executor._local.decode is None
        assert answers(running) == alone[0]


def test_tokens_of_one_gpu(folder):
    """Preempted, without the step ahead, and in larger chunks."""
    settings = {"max_total_tokens": 96, "chunked_prefill_size": 33}
    with engine(folder, device="cuda", **settings) as running:
        want = answers(running)
    with engine(folder, disable_overlap_schedule=True, **{**PAIR, **settings}) as running:
        assert answers(running) == want


def test_prompt_graphs(folder, alone):
    settings = {"cuda_graph_max_bs_prefill": 64, "chunked_prefill_size": 33}
    running = engine(folder, **settings, **PAIR)
    try:
        runner = running._core.executor._local.prefill
        assert runner is not None, "prompt steps were not captured"
        assert answers(running) == alone[0]
    finally:
        closed(running)


def test_speculation(folder, alone):
    """Broadcasts of what was drawn are part of the rounds' graphs."""
    running = engine(folder, **SPECULATION, **PAIR)
    try:
        assert running._core.executor._local.rounds is not None, "rounds were not captured"
        assert answers(running) == alone[0]
    finally:
        closed(running)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("idle", [False, True])
def test_a_lost_rank_ends_the_engine_and_not_the_process(folder, idle):
    running = engine(folder, **PAIR)
    try:
        handle = running.submit(PROMPTS[0], replace(GREEDY, max_new_tokens=4 if idle else 400))
        updates = iter(handle)
        next(updates)
        if idle:
            list(updates)
        (process,) = running._ranks._processes
        os.kill(process.pid, signal.SIGKILL)
        begin = time.monotonic()
        if not idle:
            assert "rank 1" in list(updates)[-1].error
        running._thread.join(20)
        assert not running._thread.is_alive()
        assert time.monotonic() - begin < 20
        assert "rank 1" in running.failure
    finally:
        running.shutdown()
    assert not torch.distributed.is_initialized()
    torch.zeros(8, device="cuda:0").sum().item()  # the device is still of use
