"""Sends tasks as they arrive, at most so many at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from inkling_rocm.bench.clients import Client
from inkling_rocm.bench.workload import Outcome, Task

MAX_THREADS = 1024


def send(
    client: Client, tasks: Sequence[Task], *, max_concurrency: int | None, progress: bool = True
) -> tuple[list[Outcome], float]:
    """Run every task, started at its arrival or when a place is free, whichever is later.

    Args:    max_concurrency: requests in flight; None = one thread a request, at most MAX_THREADS.
    Returns: outcomes in the tasks' order; seconds from the first request to the last answer.
    """
    places = min(max_concurrency or len(tasks), MAX_THREADS)
    bar = tqdm(total=len(tasks), desc="requests", unit="req", disable=not progress)
    lock = threading.Lock()
    began = time.perf_counter()

    def run(task: Task) -> Outcome:
        outcome = client.run(task)
        with lock:
            bar.update()
        return outcome

    with bar, ThreadPoolExecutor(places, thread_name_prefix="bench") as pool:
        futures = []
        for task in tasks:
            time.sleep(max(began + task.arrival - time.perf_counter(), 0.0))
            futures.append(pool.submit(run, task))
        outcomes = [future.result() for future in futures]
    return outcomes, time.perf_counter() - began
