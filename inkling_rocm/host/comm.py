"""The tensor-parallel groups: ranks that really talk, and one rank measured alone."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in newer releases of torch.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankSlice:
    """One rank of a group whose other ranks do not exist: for measuring its work alone.

    Sums are its own part and gathered tensors its own values in everyone's place, so shapes are
    those of the whole group while RESULTS ARE MEANINGLESS.
    """

    tp_rank = 0

    def __init__(self, tp_size: int):
        self.tp_size = tp_size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.tp_size, dim)


class TorchComm:
    """The ranks of torch.distributed's default group, which must be initialised: NCCL (RCCL) on
    GPUs, gloo on CPUs. Both leave the same bits on every rank."""

    def __init__(self):
        self.tp_rank = dist.get_rank()
        self.tp_size = dist.get_world_size()

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = torch.empty((self.tp_size, *x.shape), dtype=x.dtype, device=x.device)
        _gather_into(parts.flatten(0, 1), x.contiguous())
        return torch.cat(parts.unbind(0), dim)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values for everyone, in place."""
        dist.broadcast(x, 0)
        return x


def connect(rank: int, size: int, port: int, device: torch.device, seconds: int) -> TorchComm:
    """Join the group of all ranks on this machine."""
    on_gpu = device.type == "cuda"
    # NCCL's watchdog would end this whole process, a server's included, when a rank is lost; Ranks
    # notices that itself and ends the engine alone.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=device if on_gpu else None,
    )
    return TorchComm()
