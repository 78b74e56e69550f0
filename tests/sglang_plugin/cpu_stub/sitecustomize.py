"""Runs before anything in the processes of the test engine: lets SGLang be imported without CUDA
libraries. On PYTHONPATH of those processes alone."""

import importlib.util
import sys
import types
from pathlib import Path

import torch

# torchvision's CPU wheel lacks operators that its import declares fakes for.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
_TORCHVISION.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_TORCHVISION.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

# The package of FA4's kernels needs nvidia-cutlass-dsl; its plain submodules do not.
if importlib.util.find_spec("cutlass") is None:
    for _root in map(Path, sys.path):
        if (_root / "sglang" / "kernels").is_dir():
            _name = "sglang.kernels.ops.attention.flash_attn.cute"
            _module = types.ModuleType(_name)
            _module.__path__ = [str(_root.joinpath(*_name.split(".")))]
            sys.modules[_name] = _module
            break
