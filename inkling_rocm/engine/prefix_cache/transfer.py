"""A page's K/V and a slot's convolution rows as named tensors, for all layers at once.

The views go to `HostStore.put`, which copies them; what `HostStore.get` gives is copied back into
the views of the page or slot taken for it. Ring rows are addressed by position modulo their number,
so a snapshot may be restored into any slot but is of the positions it was taken at.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.rings import ConvRings


def page_views(pool: PagePool, page: int) -> dict[str, Tensor]:
    """K and V of a page in every layer of the pool: "kv" [layers, 2, page_size, g, D], and in the
    layers beside them: "beside_0", ..."""
    beside = {f"beside_{i}": storage[:, :, page] for i, storage in enumerate(pool.beside)}
    return {"kv": pool.storage[:, :, page], **beside}


def slot_views(rings: ConvRings, slot: int) -> dict[str, Tensor]:
    """All that belongs to a slot: "rings_0", ... [rings of one width, R, C]."""
    return {f"rings_{i}": storage[:, slot] for i, storage in enumerate(rings.storage)}


def entry_bytes(views: Mapping[str, Tensor]) -> int:
    """Bytes of an entry with these tensors."""
    return sum(view.numel() * view.element_size() for view in views.values())


def restore(views: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy what a store gave into the views, bit by bit.

    Raises:
        ValueError: a name, shape or dtype differs: the entry is of another pool.
    """
    for name in sorted(views.keys() | tensors.keys()):
        wanted, got = _kind(views.get(name)), _kind(tensors.get(name))
        if wanted != got:
            raise ValueError(
                f"tensor {name!r} of a cache entry is {got}, wanted {wanted}: the fingerprint of "
                "the stores must hold whatever decides the pools' shapes"
            )
    for name, view in views.items():
        view.copy_(tensors[name], non_blocking=True)


def _kind(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
