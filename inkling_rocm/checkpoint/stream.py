"""Fill parameters from a stream of (released name, whole tensor): what hosts hand over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from inkling_rocm.checkpoint.entry import copy_from_file
from inkling_rocm.checkpoint.files import CheckpointError
from inkling_rocm.checkpoint.loader import PART_PREFIXES
from inkling_rocm.checkpoint.table import weight_entries
from inkling_rocm.config import InklingConfig


def load_stream(
    stream: Iterable[tuple[str, Tensor]],
    config: InklingConfig,
    weights: Mapping[str, Tensor],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_parallel: bool = False,
    complete: bool = True,
) -> int:
    """Copy what this rank owns of every tensor; tensors of parts that `weights` lacks are skipped.

    Args:
        weights: parameters by the table's names, as `allocate` made them for this rank.
        expert_parallel: see weight_entries.
        complete: every parameter must be filled; False = an update of some.
    Returns: tensors used.
    Raises: CheckpointError: names the tensor, what it is and what was wanted.
    """
    known = {
        piece.name: (entry, index)
        for entry in weight_entries(config, expert_parallel)
        for index, piece in enumerate(entry.pieces)
    }
    missing = {name for name, (entry, _) in known.items() if entry.name in weights}
    used = 0
    for name, tensor in stream:
        if name not in known:
            if name.startswith(tuple(PART_PREFIXES.values())):
                continue
            raise CheckpointError(f"tensor {name} is not one of this model's; check config.json")
        entry, index = known[name]
        if entry.name not in weights:
            if entry.part == "text":
                raise CheckpointError(
                    f"tensor {name}: the chosen kernels keep {entry.name} in another layout only, "
                    "so it cannot be updated; choose --moe-runner-backend triton"
                )
            continue
        piece = entry.pieces[index]
        if tuple(tensor.shape) != piece.shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, wanted {list(piece.shape)}; check "
                "that config.json and the weights belong together"
            )
        target = entry.views(weights[entry.name], tp_rank, tp_size)[index]
        copy_from_file(target, tensor[piece.file_slice(tp_rank, tp_size)], piece.layout)
        missing.discard(name)
        used += 1
    if complete and missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, among them {min(missing)}")
    return used
