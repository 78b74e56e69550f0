"""The model, written once against ops and host."""

from inkling_rocm.model.mtp import DraftBlocks
from inkling_rocm.model.stack import InklingModel

__all__ = ["DraftBlocks", "InklingModel"]
