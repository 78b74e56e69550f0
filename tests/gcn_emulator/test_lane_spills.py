"""Scalar registers kept in lanes of a vector register: definedness is tracked lane by lane."""

import numpy as np
import pytest
from test_waves import STORE_V2, WAVE_ID, execute, scheduling  # noqa: F401

from gcn_emulator import EmuError

# s20 is undefined, s21 is not; the compiler spills both and restores both
SPILL = "s_mov_b32 s21, 7\nv_writelane_b32 v40, s21, 4\nv_writelane_b32 v40, s20, 3\n"
USE_S31 = "v_mov_b32_e32 v2, s31\n" + STORE_V2


@pytest.mark.parametrize("lazy", [False, True])
def test_an_undefined_scalar_in_another_lane_does_not_matter(scheduling, lazy):  # noqa: F811
    text = SPILL + "v_readlane_b32 s30, v40, 3\nv_readlane_b32 s31, v40, 4\n"
    out, _ = execute(text + USE_S31, waves=2, lazy=lazy)
    assert np.array_equal(out, np.full(128, 7))


def test_an_undefined_scalar_that_comes_back_and_is_used():
    text = SPILL + "v_readlane_b32 s31, v40, 3\n"
    execute(text + "s_endpgm\n", waves=1)  # restored and never used
    with pytest.raises(EmuError, match="reads s31, which holds no defined value"):
        execute(text + "s_add_u32 s31, s31, 1\ns_endpgm\n", waves=1)
    with pytest.raises(EmuError, match="reads v2, which holds no defined value"):
        execute(text + USE_S31, waves=1)


def test_a_lane_that_was_never_written():
    text = "s_mov_b32 s21, 7\nv_writelane_b32 v40, s21, 4\nv_readlane_b32 s31, v40, 5\n"
    with pytest.raises(EmuError, match="reads v2, which holds no defined value"):
        execute(text + USE_S31, waves=1)


@pytest.mark.parametrize("definition", ["v_writelane_b32 v40, s21, 3", "v_mov_b32_e32 v40, s21"])
def test_a_later_definition_counts(definition):
    out, _ = execute(SPILL + definition + "\nv_readlane_b32 s31, v40, 3\n" + USE_S31, waves=1)
    assert np.array_equal(out, np.full(64, 7))


def test_an_undefined_lane_of_a_defined_register():
    text = "v_mov_b32_e32 v40, 9\n" + SPILL
    out, _ = execute(text + "v_readlane_b32 s31, v40, 5\n" + USE_S31, waves=1)
    assert np.array_equal(out, np.full(64, 9))
    with pytest.raises(EmuError, match="reads v2, which"):
        execute(text + "v_readlane_b32 s31, v40, 3\n" + USE_S31, waves=1)


@pytest.mark.parametrize(
    "copy",
    ["v_accvgpr_write_b32 a3, v40\nv_accvgpr_read_b32 v41, a3\n", "v_mov_b32_e32 v41, v40\n"],
)
def test_copies_of_a_register_keep_its_undefined_lanes(copy):
    out, _ = execute(SPILL + copy + "v_readlane_b32 s31, v41, 4\n" + USE_S31, waves=1)
    assert np.array_equal(out, np.full(64, 7))
    with pytest.raises(EmuError, match="reads v2, which"):
        execute(SPILL + copy + "v_readlane_b32 s31, v41, 3\n" + USE_S31, waves=1)


def test_a_lane_number_must_be_defined():
    for text in ("v_writelane_b32 v40, s21, s20", "v_readlane_b32 s31, v40, s20"):
        with pytest.raises(EmuError, match="reads s20, which"):
            execute(SPILL + text + "\ns_endpgm\n", waves=1)


def test_undefined_lanes_survive_a_split_and_a_merge(scheduling):  # noqa: F811
    """Wave 1 overwrites the undefined lane; what wave 0 holds is undefined after they meet."""
    text = WAVE_ID + SPILL + "s_cmp_eq_u32 s4, 1\ns_cbranch_scc0 join\n"
    text += "v_writelane_b32 v40, s21, 3\njoin:\nv_readlane_b32 s31, v40, {lane}\n" + USE_S31
    out, _ = execute(text.format(lane=4), waves=2)
    assert np.array_equal(out, np.full(128, 7))
    with pytest.raises(EmuError, match="reads v2, which"):
        execute(text.format(lane=3), waves=2)


def test_a_load_replaces_what_a_register_held():
    text = SPILL + "v_lshlrev_b32_e32 v9, 2, v0\nglobal_load_dword v40, v9, s[0:1]\n"
    text += "s_waitcnt vmcnt(0)\nv_readlane_b32 s31, v40, 3\n"
    out, _ = execute(text + USE_S31, waves=1, memory=np.arange(64, dtype=np.uint32))
    assert np.array_equal(out, np.full(64, 3))
