"""What recording graphs asks of the interpreter."""

import gc
from contextlib import suppress

import pytest

from inkling_rocm.engine.buckets import collection_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_meanwhile(enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(RuntimeError), collection_paused():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
