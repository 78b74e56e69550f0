"""Collectives of the model over SGLang's tensor-parallel group."""

from __future__ import annotations

from torch import Tensor


class SGLangComm:
    """host.Comm over SGLang's GroupCoordinator."""

    def __init__(self, group):
        self._group = group
        self.tp_rank: int = group.rank_in_group
        self.tp_size: int = group.world_size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.tp_size == 1 else self._group.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x if self.tp_size == 1 else self._group.all_gather(x, dim)
