"""Run by test_loader: how far the resident set rises above the allocated model while it loads.

Prints one JSON object; sizes in bytes.
"""

import json
import math
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open

from inkling_rocm.checkpoint import allocate, export_checkpoint, fill_dummy, load_weights
from inkling_rocm.checkpoint.table import released_names, weight_entries
from inkling_rocm.config import parse_config
from tests.checkpoint import tiny


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def _peak_growth(action) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark so far
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before


def main() -> None:
    config_json = tiny.config_json()
    for key in ("mtp_config", "audio_config", "vision_config"):
        del config_json[key]
    config_json["text_config"] |= {
        "hidden_size": 512, "num_hidden_layers": 8, "local_layer_ids": [0], "dense_mlp_idx": 2,
        "dense_intermediate_size": 4096, "intermediate_size": 1024,
    }  # fmt: skip
    config = parse_config(config_json)
    weights = allocate(config, dtype=torch.bfloat16, device="cpu")
    fill_dummy(config, weights)  # touches every page
    largest = max(
        2 * math.prod(piece.shape) for entry in weight_entries(config) for piece in entry.pieces
    )
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(config, weights, folder)
        file = next(Path(folder).glob("*.safetensors"))

        def naive() -> None:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in released_names(config):
                    tensors.get_tensor(name).sum()

        facts = {
            "model_bytes": sum(weight.nbytes for weight in weights.values()),
            "largest_tensor_bytes": largest,
            "peak_growth_bytes": _peak_growth(
                lambda: load_weights(folder, config, weights, progress=False)
            ),
            "naive_growth_bytes": _peak_growth(naive),
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
