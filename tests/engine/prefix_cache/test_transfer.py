"""Pages and ring slots through the tiers and back, bit by bit."""

import numpy as np
import pytest
import torch

from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.prefix_cache.blocks import block_bytes_for
from inkling_rocm.engine.prefix_cache.disk_store import DiskStore
from inkling_rocm.engine.prefix_cache.store import HostStore
from inkling_rocm.engine.prefix_cache.transfer import entry_bytes, page_views, restore, slot_views
from inkling_rocm.engine.rings import ConvRings
from inkling_rocm.host import CONV_STREAMS
from tests.engine.prefix_cache.entries import FINGERPRINT, key_of
from tests.engine.tiny import tiny_config

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def pool_of(dtype, device, layers=(0, 2, 5)) -> PagePool:
    return PagePool(
        layers=layers,
        window=0,
        pages=6,
        page_size=4,
        num_kv_heads=2,
        head_dim=8,
        slots=3,
        context_length=64,
        dtype=dtype,
        device=torch.device(device),
    )


def rings_of(dtype, device) -> ConvRings:
    text = tiny_config(layer_is_local=(True, False)).text
    return ConvRings(text, slots=5, dtype=dtype, device=torch.device(device), draft_tokens=2)


def randomize(tensor) -> None:
    """Every bit pattern, NaNs with payloads among them."""
    bits = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8)
    tensor.copy_(bits.to(tensor.device).view(tensor.dtype).view(tensor.shape))


def bits_of(tensor):
    return tensor.contiguous().view(torch.uint8).cpu().clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("through_disk", [False, True])
def test_a_page_and_a_slot_come_back_elsewhere(tmp_path, dtype, device, through_disk):
    pool, rings = pool_of(dtype, device), rings_of(dtype, device)
    randomize(pool.storage)
    for storage in rings.storage:
        randomize(storage)
    page, slot = bits_of(pool.storage[:, :, 2]), ring_bits(rings, 3)
    kinds = [entry_bytes(page_views(pool, 1)), entry_bytes(slot_views(rings, 1))]
    on_gpu = device == "cuda"
    store = HostStore(
        1 << 20,
        DiskStore(tmp_path, 1 << 30, FINGERPRINT) if through_disk else None,
        block_bytes=block_bytes_for(kinds),
        pin_memory=on_gpu,
    )
    store.put(key_of(0), page_views(pool, 2))
    store.put(key_of(1), slot_views(rings, 3))
    # What a step that follows on the same stream does to a page given up.
    pool.storage[:, :, 2] = float("nan")
    for views in slot_views(rings, 3).values():
        views.fill_(float("nan"))
    if through_disk:
        store.close()
        lower = DiskStore(tmp_path, 1 << 30, FINGERPRINT)
        store = HostStore(1 << 20, lower, pin_memory=on_gpu)
        store.prefetch([key_of(0)])
    others = bits_of(pool.storage[:, :, [0, 1, 2, 3, 5]])
    restore(page_views(pool, 4), store.get(key_of(0), torch.device(device)))
    restore(slot_views(rings, 1), store.get(key_of(1), torch.device(device)))
    assert torch.equal(bits_of(pool.storage[:, :, 4]), page)
    assert torch.equal(bits_of(pool.storage[:, :, [0, 1, 2, 3, 5]]), others)
    assert ring_bits(rings, 1) == slot
    store.close()


def ring_bits(rings, slot) -> dict:
    return {
        (layer, stream): bits_of(rings.state(layer, stream)[slot]).tolist()
        for layer in range(2)
        for stream in CONV_STREAMS
    }


def test_a_snapshot_holds_every_ring():
    """A ring left out would keep what the slot held before."""
    rings = rings_of(torch.float32, "cpu")
    views = slot_views(rings, 2)
    for view in views.values():
        view.fill_(7)
    for layer in range(2):
        for stream in CONV_STREAMS:
            assert (rings.state(layer, stream)[2] == 7).all()
    assert entry_bytes(views) == sum(
        rings.state(layer, stream)[2].numel() * 4 for layer in range(2) for stream in CONV_STREAMS
    )


def test_what_lies_beside_goes_along():
    """A block draft's layers in the model's pages, and hidden states kept as wide as a ring."""
    pool, rings = pool_of(torch.float32, "cpu"), rings_of(torch.float32, "cpu")
    beside = [pool.add_layers(2, 1, 4), pool.add_layers(1, 3, 2)]
    hidden = tiny_config().text.hidden_size
    kept = rings.add_storage(4, hidden, dtype=torch.float32, device=torch.device("cpu"))
    for storage in beside:
        randomize(storage)
    randomize(kept)
    store = HostStore(1 << 20, None, pin_memory=False)
    store.put(key_of(0), page_views(pool, 2))
    store.put(key_of(1), slot_views(rings, 3))
    restore(page_views(pool, 4), store.get(key_of(0)))
    restore(slot_views(rings, 1), store.get(key_of(1)))
    for storage in beside:
        assert torch.equal(bits_of(storage[:, :, 4]), bits_of(storage[:, :, 2]))
    assert torch.equal(bits_of(kept[1]), bits_of(kept[3]))
    pool.copy_pages(np.array([[2, 5]], np.int32))
    for storage in beside:
        assert torch.equal(bits_of(storage[:, :, 5]), bits_of(storage[:, :, 2]))
    store.close()


@pytest.mark.gpu
def test_memory_reused_between_gpu_copies_and_disk_reads_is_never_mixed_up(tmp_path):
    """A small host tier: blocks go from copies of the GPU to the threads and back all the time."""
    device = torch.device("cuda")
    contents = [torch.full((1 << 22,), n, dtype=torch.int32, device=device) for n in range(24)]
    store = HostStore(
        6 * (16 << 20), DiskStore(tmp_path, 1 << 34, FINGERPRINT), pin_memory=True
    )  # fmt: skip
    for turn in range(4):
        for number, content in enumerate(contents):
            staged = content.clone()
            store.put(key_of(number), {"kv": staged})
            staged.fill_(-1)
            store.prefetch([key_of((number + 7 * turn) % 24)])
            other = (number * 5 + turn) % 24
            got = store.get(key_of(other), device)
            assert got is None or (got["kv"] == other).all()
        store.flush()
    store.close()


def test_an_entry_of_another_pool_is_refused():
    views = page_views(pool_of(torch.float32, "cpu"), 1)
    other = page_views(pool_of(torch.float32, "cpu", layers=(0,)), 1)
    with pytest.raises(ValueError, match=r"'kv' of a cache entry is .*\(1, 2, 4, 2, 8\), wanted"):
        restore(views, other)
    with pytest.raises(ValueError, match=r"is torch\.bfloat16"):
        restore(views, page_views(pool_of(torch.bfloat16, "cpu"), 1))
    with pytest.raises(ValueError, match="'kv' of a cache entry is absent"):
        restore(views, {})
