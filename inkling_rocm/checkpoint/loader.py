"""Stream a checkpoint into allocated parameters.

Each tensor is mapped, copied into its place (of it only the slice this rank owns) and unmapped
again, so that peak memory is the model plus the one largest tensor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from inkling_rocm.checkpoint.entry import Kind, Piece, WeightEntry, copy_from_file
from inkling_rocm.checkpoint.files import (
    DTYPE_BYTES,
    CheckpointError,
    StoredTensor,
    scan_checkpoint,
)
from inkling_rocm.checkpoint.table import released_names, weight_entries
from inkling_rocm.config import InklingConfig

logger = logging.getLogger(__name__)

_FLOATS = ("BF16", "F16", "F32")
# What the gate reads in fp32: published in fp32, in bf16 in files that transformers re-saved.
_GATE_FLOATS = ("F32", "BF16")
_QUANTISED_DTYPES = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")
_QUANTISED_SUFFIXES = (
    "scale", "scale2", "scales", "scale_inv", "blocks", "input_amax", "original_shape", "packed",
)  # fmt: skip
PART_PREFIXES = {"mtp": "model.mtp.", "audio": "model.audio.", "vision": "model.visual."}
_SHOWN = 8  # names listed before an error or a report says how many more there are


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did.

    Attributes:
        num_tensors: tensors of the files that were read (in part, for one rank of several).
        bytes_read: bytes of them that this rank needed.
        seconds: wall time of the copying.
        unused: reason -> names of the file's tensors that were left out, sorted.
    """

    num_tensors: int
    bytes_read: int
    seconds: float
    unused: Mapping[str, tuple[str, ...]]

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_read / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        read = (
            f"read {self.num_tensors} tensors, {self.bytes_read / 1e9:.2f} GB in "
            f"{self.seconds:.1f} s ({self.bytes_per_second / 1e9:.2f} GB/s)"
        )
        unused = ", ".join(f"{len(names)} of {reason}" for reason, names in self.unused.items())
        return f"{read}; not used: {unused or 'none'}"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One tensor to copy: where it is, and the view of the parameter that it fills."""

    stored: StoredTensor
    piece: Piece
    target: Tensor


def load_weights(
    path: str | Path,
    config: InklingConfig,
    weights: Mapping[str, Tensor],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_parallel: bool = False,
    progress: bool = True,
) -> LoadReport:
    """Fill `weights` from the checkpoint in folder `path`.

    Args:    weights: parameters by name, from `allocate` for the same rank; only these are
             loaded, the file's other known tensors are reported as unused.
             progress: show a bar with bytes/s on stderr.
    Raises:  CheckpointError: names file, tensor, got, wanted and the next step. Nothing was
             written unless the error is about reading a file's data.
    """
    stored = scan_checkpoint(Path(path))
    refuse_quantised(stored)
    entries = weight_entries(config, expert_parallel)
    jobs = _plan(Path(path), entries, weights, stored, tp_rank, tp_size)
    unused = _explain_rest(config, weights, stored)
    return _run(Path(path), jobs, unused, tp_rank, tp_size, progress=progress)


def load_entries(
    path: str | Path,
    entries: Sequence[WeightEntry],
    weights: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    *,
    progress: bool = True,
) -> LoadReport:
    """Fill whole (unsplit) parameters by another table than the model's.

    Args:    entries: the table. stored: the folder's tensors by the names the table uses; each must
             be one of the table's.
    Raises:  CheckpointError: as load_weights.
    """
    jobs = _plan(Path(path), entries, weights, stored, 0, 1)
    _refuse_unknown(stored, sorted(stored.keys() - {p.name for e in entries for p in e.pieces}))
    return _run(Path(path), jobs, {}, 0, 1, progress=progress)


def _run(
    path: Path,
    jobs: Sequence[_Job],
    unused: Mapping[str, tuple[str, ...]],
    tp_rank: int,
    tp_size: int,
    *,
    progress: bool,
) -> LoadReport:
    """Copy, with a bar."""
    total = sum(_job_bytes(job) for job in jobs)
    start = time.perf_counter()
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress
    ) as bar:
        for job in sorted(jobs, key=lambda j: (j.stored.file, j.stored.offset)):
            for copied_bytes in _copy(job, tp_rank, tp_size):
                bar.update(copied_bytes)
    report = LoadReport(
        num_tensors=len(jobs),
        bytes_read=total,
        seconds=time.perf_counter() - start,
        unused=unused,
    )
    logger.info("%s: %s", path, report)
    return report


def _plan(
    folder: Path,
    table: Sequence[WeightEntry],
    weights: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    tp_rank: int,
    tp_size: int,
) -> list[_Job]:
    """Match every parameter with its tensors and check each one before anything is read."""
    entries = {entry.name: entry for entry in table}
    jobs, missing = [], []
    for name, parameter in weights.items():
        if name not in entries:
            raise CheckpointError(f"parameter {name} is not in the weight table of this config")
        entry = entries[name]
        wanted = entry.shape(tp_rank, tp_size)
        if tuple(parameter.shape) != wanted:
            raise CheckpointError(
                f"parameter {name} is allocated as {tuple(parameter.shape)}, wanted {wanted} for "
                f"rank {tp_rank} of {tp_size}; allocate with the same tp_rank and tp_size"
            )
        views = entry.views(parameter, tp_rank, tp_size)
        for piece, view in zip(entry.pieces, views, strict=True):
            if piece.name not in stored:
                missing.append(piece.name)
                continue
            _check(stored[piece.name], piece, entry.kind)
            jobs.append(_Job(stored=stored[piece.name], piece=piece, target=view))
    if missing:
        drafts = " (files saved by transformers have no MTP blocks)"
        raise CheckpointError(
            f"{folder}: missing tensor {_listed(missing)}"
            f"{drafts if all(n.startswith('model.mtp.') for n in missing) else ''}; config.json "
            f"asks for it, so check that config.json and the weights belong together"
        )
    return jobs


def _check(stored: StoredTensor, piece: Piece, kind: Kind) -> None:
    if stored.shape != piece.shape:
        raise CheckpointError(
            f"{stored.file}: tensor {piece.name} has shape {list(stored.shape)}, wanted "
            f"{list(piece.shape)}; check that config.json and the weights belong together"
        )
    allowed = _GATE_FLOATS if kind in ("gate_bias", "gate_scale", "mlp_scale") else _FLOATS
    if stored.dtype not in allowed:
        raise CheckpointError(
            f"{stored.file}: tensor {piece.name} is {stored.dtype}, wanted one of "
            f"{', '.join(allowed)}; convert the checkpoint, e.g. to bf16"
        )


def _copy(job: _Job, tp_rank: int, tp_size: int) -> Iterator[int]:
    """Fill the job's target; yields the bytes of each step for the progress bar."""
    element_bytes = DTYPE_BYTES[job.stored.dtype]
    file, name = job.stored.file, job.stored.name
    try:
        # Opened anew for each tensor: pages of a mapping count as ours until it is closed.
        with safe_open(file, framework="pt", device="cpu") as tensors:
            source = tensors.get_slice(name)[job.piece.file_slice(tp_rank, tp_size)]
            if source.ndim == 3 and job.piece.layout != "conv":
                # Expert by expert: another device then needs staging for one, not for all.
                for target, expert in zip(job.target, source, strict=True):
                    copy_from_file(target, expert, job.piece.layout)
                    yield target.numel() * element_bytes
                    del expert
            else:
                copy_from_file(job.target, source, job.piece.layout)
                yield job.target.numel() * element_bytes
            del source
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: cannot read tensor {name} ({error}); download the file again"
        ) from error


def _job_bytes(job: _Job) -> int:
    """File bytes of the slice that the rank copies."""
    return job.target.numel() * DTYPE_BYTES[job.stored.dtype]


def refuse_quantised(stored: Mapping[str, StoredTensor]) -> None:
    """Raises: CheckpointError: a tensor that belongs to a quantised checkpoint."""
    for name, tensor in stored.items():
        last = name.rsplit(".", 1)[-1]
        marked = last in _QUANTISED_SUFFIXES or last.endswith(
            tuple("_" + suffix for suffix in _QUANTISED_SUFFIXES)
        )
        if (marked and last != "global_scale") or tensor.dtype in _QUANTISED_DTYPES:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} ({tensor.dtype}) belongs to a quantised checkpoint; "
                f"only bf16, fp16 and fp32 weights load so far. Point to the unquantised one."
            )


def _explain_rest(
    config: InklingConfig, weights: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[str, ...]]:
    """Give a reason for each tensor of the file that no job consumes, or refuse it."""
    known = released_names(config)
    entries = {entry.name: entry for entry in weight_entries(config)}
    loaded_parts = {entries[name].part for name in weights}
    unused: dict[str, list[str]] = {}
    unknown = []
    for name in sorted(stored):
        if name in known:
            entry: WeightEntry = known[name][0]
            if entry.name not in weights:
                unused.setdefault(f"{entry.part}: not asked for", []).append(name)
            continue
        part = next((p for p, prefix in PART_PREFIXES.items() if name.startswith(prefix)), None)
        if name == "model.mtp.chain_norm.weight":
            unused.setdefault("mtp: chain_hidden_post_norm is false", []).append(name)
        elif part is not None and part not in loaded_parts:
            unused.setdefault(f"{part}: not in config.json", []).append(name)
        else:
            unknown.append(name)
    _refuse_unknown(stored, unknown)
    return {reason: tuple(names) for reason, names in unused.items()}


def _refuse_unknown(stored: Mapping[str, StoredTensor], names: Sequence[str]) -> None:
    if names:
        file = stored[names[0]].file
        raise CheckpointError(
            f"{file}: unknown tensor {_listed(names)}; config.json does not account for it, so "
            f"check that config.json and the weights belong together"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
