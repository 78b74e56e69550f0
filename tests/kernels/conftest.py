"""The kernels run on gcn_emulator for both AMD architectures, or on a GPU."""

from tests.triton_attn.conftest import target

__all__ = ["target"]
