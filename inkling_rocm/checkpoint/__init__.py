"""Reading and writing Inkling checkpoints."""

from inkling_rocm.checkpoint.demo import demo_checkpoint, resolve_model_path
from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.export import export_checkpoint
from inkling_rocm.checkpoint.files import CheckpointError
from inkling_rocm.checkpoint.loader import LoadReport, load_weights
from inkling_rocm.checkpoint.table import allocate, weight_bytes, weight_entries

__all__ = [
    "CheckpointError",
    "LoadReport",
    "allocate",
    "demo_checkpoint",
    "export_checkpoint",
    "fill_dummy",
    "load_weights",
    "resolve_model_path",
    "weight_bytes",
    "weight_entries",
]
