"""Layouts are safetensors files, and every tensor in them is aligned."""

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_rocm.engine.prefix_cache.layout import DTYPES, Layout
from tests.engine.prefix_cache.entries import same_bits

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES), max_size=5))
def test_header_and_data_are_a_safetensors_file(kinds):
    tensors = {}
    for number, (dtype, shape) in enumerate(kinds):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        bits = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        tensors[f"t{number}"] = bits.view(dtype).view(shape)
    layout = Layout.of(tensors)
    data = layout.pack(tensors)
    assert data.numel() == layout.nbytes
    assert len(layout.header) % 8 == 0
    assert same_bits(safetensors.torch.load(layout.header + data.numpy().tobytes()), tensors)
    assert Layout.parse(layout.header) == layout
    assert same_bits(layout.unpack(data), tensors)


def test_strided_tensors_are_packed_in_their_logical_order():
    base = torch.arange(24.0).view(2, 3, 4)
    tensors = {"a": base[:, 1], "b": base.transpose(0, 2)}
    layout = Layout.of(tensors)
    assert same_bits(layout.unpack(layout.pack(tensors)), tensors)


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(ValueError, match=r"'x' is torch\.complex64; an entry holds"):
        Layout.of({"x": torch.zeros(1, dtype=torch.complex64)})
