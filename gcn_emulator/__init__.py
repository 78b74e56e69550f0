"""gfx942/gfx950 code, executed instruction by instruction on a CPU."""

from gcn_emulator.counters import Counters, StaticInfo, static_info
from gcn_emulator.formats import EmuError
from gcn_emulator.kernel import Kernel
from gcn_emulator.parser import parse_program

__all__ = ["Counters", "EmuError", "Kernel", "StaticInfo", "parse_program", "static_info"]
