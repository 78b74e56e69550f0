"""A tensor-parallel rank other than 0: `python -m inkling_rocm.engine.follower`, started by
ranks.Ranks.

Messages come pickled through stdin: Start, MemoryPlan, then one StepInput a step. Its end means
that rank 0 is gone or done. stdout carries Ready, or Failed as the last words; everything else that
is printed goes to stderr.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import sys
import threading
from dataclasses import replace
from typing import Any, BinaryIO

from inkling_rocm.engine.build import build_executor
from inkling_rocm.engine.collection import short_collections
from inkling_rocm.engine.free_memory import free_bytes
from inkling_rocm.engine.load import load_parts
from inkling_rocm.engine.ranks import Failed, Ready
from inkling_rocm.engine.shared_sampler import ToldSampler
from inkling_rocm.host.comm import connect


def main() -> None:
    """Follow until stdin ends."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread of its own: the main one may wait in a collective for a rank 0 that is gone.
    threading.Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    try:
        _follow(inbox, reports)
    except BaseException as error:
        logging.getLogger(__name__).exception("this rank ends")
        reason = f"{type(error).__name__}: {error}"
        _report(reports, Failed(reason=reason, mistake=isinstance(error, (ValueError, OSError))))
        os._exit(1)  # threads of the collectives may still wait for other ranks


def _read(stream: BinaryIO, inbox: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            message = pickle.load(stream)
        except (EOFError, pickle.UnpicklingError):  # it ended between messages, or in one
            os._exit(0)
        inbox.put(message)


def _follow(inbox: queue.SimpleQueue[Any], reports: BinaryIO) -> None:
    start = inbox.get()
    logging.basicConfig(
        level="WARNING",
        format=f"%(asctime)s %(levelname)s rank {start.rank} %(name)s: %(message)s",
    )
    # Which pages are shared is in rank 0's books, and so are their checks.
    args = replace(start.args, check_invariants=False)
    parts = load_parts(args, start.rank)
    _report(reports, Ready(free=free_bytes(parts.device)))
    plan = inbox.get()
    comm = connect(start.rank, args.tp_size, start.port, parts.device, args.dist_timeout)
    executor = build_executor(parts, args, plan, comm, ToldSampler(comm))
    with short_collections(parts.device):
        while True:
            executor.follow(inbox.get())


def _report(reports: BinaryIO, message: Any) -> None:
    pickle.dump(message, reports)
    reports.flush()


if __name__ == "__main__":
    main()
