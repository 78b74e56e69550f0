"""Stands in for a module of SGLang that its kernels import."""

import torch


def is_cuda():
    return torch.cuda.is_available() and torch.version.hip is None


def is_hip():
    return torch.version.hip is not None


def is_gfx95_supported():
    return False


def is_gfx1250_supported():
    return False


def is_sm121():
    return False


def get_device_core_count(index=0):
    return torch.cuda.get_device_properties(index).multi_processor_count
