"""The config of a --model-path that may also be a lone config.json (no weights are needed)."""

from __future__ import annotations

from pathlib import Path

from inkling_rocm.checkpoint import resolve_model_path
from inkling_rocm.config import InklingConfig, load_config


def config_of(model_path: str) -> InklingConfig:
    """Args: model_path: a checkpoint folder, a config.json, or "demo".

    Raises: OSError, ValueError: see resolve_model_path and load_config.
    """
    file = Path(model_path)
    return load_config(file if file.is_file() else resolve_model_path(model_path))
