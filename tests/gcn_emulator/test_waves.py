"""Several waves: batches that split and meet, barriers, LDS races, undefined registers and LDS."""

import numpy as np
import pytest
from harness import M32, run

from gcn_emulator import EmuError, Kernel, workgroup
from gcn_emulator.scalars import LaneMask, mask_lanes, per_wave, take_waves, uniform

WAVE_ID = "v_lshrrev_b32_e32 v1, 6, v0\nv_readfirstlane_b32 s4, v1\n"
# every lane stores v2 to out[lane]
STORE_V2 = "v_lshlrev_b32_e32 v9, 2, v0\nglobal_store_dword v9, v2, s[0:1]\ns_endpgm\n"


def execute(body, waves=4, shared=0, *, memory=None, lazy=True, arch="gfx950", instructions=None):
    """Run a program of `waves` waves; s[0:1] points at the returned uint32 array."""
    out = np.zeros(64 * waves, np.uint32) if memory is None else memory
    address = out.ctypes.data
    setup = f"s_mov_b32 s0, {address & M32:#x}\ns_mov_b32 s1, {address >> 32:#x}\n"
    kernel = Kernel(setup + body, arch)
    kernel.run((1,), [], shared, waves, regions=[out], lazy=lazy)
    return out, kernel.races


@pytest.fixture(params=["batched", "wave by wave"])
def scheduling(request, monkeypatch):
    """Run a test with batches, and with every wave on its own: the outcome must be the same."""
    if request.param == "wave by wave":
        whole = workgroup.run_workgroup
        monkeypatch.setattr(workgroup, "_merge", lambda batches: batches)

        def separate(launch, waves):
            parts = [workgroup._take(waves, [i]) for i in range(waves.n)]
            monkeypatch.setattr(workgroup, "_merge", _once(parts))
            whole(launch, waves)

        monkeypatch.setattr("gcn_emulator.kernel.run_workgroup", separate)


def _once(parts):
    """A `_merge` that replaces the first batch by `parts` and then merges nothing."""
    state = [parts]

    def merge(batches):
        return state.pop() if state else batches

    return merge


def test_waves_take_different_branches_and_meet(scheduling):
    text = WAVE_ID + (
        "s_cmp_lt_u32 s4, 2\n"
        "s_cbranch_scc1 low\n"
        "v_mov_b32_e32 v2, 7\n"
        "s_branch join\n"
        "low:\n"
        "v_mov_b32_e32 v2, 3\n"
        "join:\n"
        "v_add_u32_e32 v2, v2, v0\n"
    )
    out, _ = execute(text + STORE_V2)
    lane = np.arange(256)
    assert np.array_equal(out, np.where(lane < 128, 3, 7) + lane)


def test_trip_counts_that_differ_between_waves(scheduling):
    text = WAVE_ID + (
        "v_mov_b32_e32 v2, 0\n"
        "s_mov_b32 s5, 0\n"
        "again:\n"
        "v_add_u32_e32 v2, 5, v2\n"
        "s_add_u32 s5, s5, 1\n"
        "s_cmp_le_u32 s5, s4\n"
        "s_cbranch_scc1 again\n"
    )
    out, _ = execute(text + STORE_V2, waves=8)
    assert np.array_equal(out, 5 * (np.arange(512) // 64 + 1))


def test_lane_masks_and_outstanding_loads_survive_a_split(scheduling):
    memory = np.arange(256, dtype=np.uint32) * 3
    text = WAVE_ID + (
        "v_lshlrev_b32_e32 v9, 2, v0\n"
        "v_cmp_gt_u32_e64 s[6:7], 100, v0\n"  # differs per wave: kept as a lane mask
        "global_load_dword v3, v9, s[0:1]\n"
        "v_mov_b32_e32 v4, 0\n"
        "s_cmp_eq_u32 s4, 1\n"
        "s_cbranch_scc0 rest\n"
        "v_mov_b32_e32 v4, 0x64\n"
        "rest:\n"
        "s_waitcnt vmcnt(0)\n"
        "v_add_u32_e32 v3, v3, v4\n"
        "v_cndmask_b32_e64 v2, v3, 1, s[6:7]\n"
        "global_store_dword v9, v2, s[0:1]\n"
        "s_endpgm\n"
    )
    out, _ = execute(text, memory=memory)
    lane = np.arange(256)
    assert np.array_equal(out, np.where(lane < 100, 1, lane * 3 + 100 * (lane // 64 == 1)))


def test_exec_is_split_with_its_wave(scheduling):
    text = WAVE_ID + (
        "v_mov_b32_e32 v2, 1\n"
        "v_cmp_gt_u32_e32 vcc, 70, v0\n"
        "s_and_saveexec_b64 s[6:7], vcc\n"
        "s_cbranch_execz skip\n"  # waves 2 and 3 skip, wave 1 has six lanes on
        "v_mov_b32_e32 v2, 9\n"
        "skip:\n"
        "s_or_b64 exec, exec, s[6:7]\n"
    )
    out, _ = execute(text + STORE_V2)
    assert np.array_equal(out, np.where(np.arange(256) < 70, 9, 1))


def test_scratch_belongs_to_its_lane_through_a_split(scheduling):
    text = WAVE_ID + (
        "scratch_store_dword off, v0, off offset:4\n"
        "s_cmp_eq_u32 s4, 2\n"
        "s_cbranch_scc1 join\n"
        "s_nop 0\n"
        "join:\n"
        "s_waitcnt vmcnt(0)\n"
        "scratch_load_dword v2, off, off offset:4\n"
        "s_waitcnt vmcnt(0)\n"
    )
    out = np.zeros(256, np.uint32)
    address = out.ctypes.data
    setup = f"s_mov_b32 s0, {address & M32:#x}\ns_mov_b32 s1, {address >> 32:#x}\n"
    kernel = Kernel(setup + text + STORE_V2, "gfx942")
    kernel.program.descriptor["private_segment_fixed_size"] = 8
    kernel.run((1,), [], 0, 4, regions=[out])
    assert np.array_equal(out, np.arange(256))


EXCHANGE = (
    "v_lshlrev_b32_e32 v3, 2, v0\nv_xor_b32_e32 v4, 0x100, v3\n"  # partner: the neighbouring wave
    "ds_write_b32 v3, v0\ns_waitcnt lgkmcnt(0)\n{barrier}"
    "ds_read_b32 v2, v4\ns_waitcnt lgkmcnt(0)\n"
)


def test_lds_exchange_between_waves(scheduling):
    out, races = execute(EXCHANGE.format(barrier="s_barrier\n") + STORE_V2, waves=2, shared=512)
    assert np.array_equal(out, np.arange(128) ^ 64)
    assert not races


def test_missing_barrier_is_a_race():
    _, races = execute(EXCHANGE.format(barrier="") + STORE_V2, waves=2, shared=512)
    assert any(kind.startswith("read after write: line 7: ds_read_b32") for kind in races)


@pytest.mark.parametrize("same", [False, True])
def test_two_waves_writing_one_address_in_one_instruction(scheduling, same):
    source = "v_mov_b32_e32 v2, 5\n" if same else "v_mov_b32_e32 v2, v0\n"
    text = source + "v_and_b32_e32 v3, 63, v0\nv_lshlrev_b32_e32 v3, 2, v3\nds_write_b32 v3, v2\n"
    _, races = execute(text + "s_waitcnt lgkmcnt(0)\ns_endpgm\n", waves=2, shared=256)
    assert bool(races) != same


def test_a_wave_may_reuse_its_own_lds(scheduling):
    text = (
        "v_lshlrev_b32_e32 v3, 2, v0\nds_write_b32 v3, v0\nds_read_b32 v2, v3\n"
        "s_waitcnt lgkmcnt(0)\nv_add_u32_e32 v2, 1, v2\nds_write_b32 v3, v2\n"
        "ds_read_b32 v2, v3\ns_waitcnt lgkmcnt(0)\n"
    )
    out, races = execute(text + STORE_V2, waves=2, shared=512)
    assert np.array_equal(out, np.arange(128) + 1)
    assert not races


def test_half_words_of_one_word_belong_to_different_waves(scheduling):
    text = "v_lshlrev_b32_e32 v3, 1, v0\nds_write_b16 v3, v0\ns_waitcnt lgkmcnt(0)\ns_barrier\n"
    text += "ds_read_u16 v2, v3\ns_waitcnt lgkmcnt(0)\n"
    out, races = execute(text + STORE_V2, waves=2, shared=256)
    assert np.array_equal(out, np.arange(128))
    assert not races


def test_a_barrier_some_waves_never_reach(scheduling):
    text = WAVE_ID + "s_cmp_eq_u32 s4, 3\ns_cbranch_scc1 done\ns_barrier\ndone:\ns_endpgm\n"
    with pytest.raises(
        EmuError, match=r"line 7: s_barrier: divergence at a barrier: waves 0, 1, 2"
    ):
        execute(text)


def test_a_barrier_with_lanes_off():
    text = "v_cmp_gt_u32_e32 vcc, 70, v0\ns_and_saveexec_b64 s[6:7], vcc\ns_barrier\ns_endpgm\n"
    with pytest.raises(EmuError, match="barrier in divergent control flow"):
        execute(text)


def test_a_loop_that_never_ends(monkeypatch):
    monkeypatch.setattr("gcn_emulator.kernel.MAX_BRANCHES", 1000)
    with pytest.raises(EmuError, match="line 4: s_branch again: 1000 branches taken"):
        execute("again:\ns_branch again\ns_endpgm\n")


UNDEFINED = {
    "an address": ("v_mov_b32_e32 v2, 0\nglobal_store_dword v7, v2, s[0:1]", "reads v7, which"),
    "stored data": ("v_mov_b32_e32 v2, 0\nglobal_store_dword v2, v7, s[0:1]", "reads v7, which"),
    "through arithmetic": (
        "v_mov_b32_e32 v2, 0\nv_add_u32_e32 v3, 1, v7\nv_xor_b32_e32 v4, v2, v3\n"
        "global_store_dword v2, v4, s[0:1]",
        "line 6: .*reads v4, which",
    ),
    "scalar": ("s_add_u32 s5, s6, 1", "reads s6, which"),
    "scc": ("s_cselect_b32 s5, 1, 0", "reads scc, which"),
    "a branch": ("s_cbranch_vccnz end\nend:", "reads vcc_lo, vcc_hi, which"),
    "an undefined comparison": (
        "v_cmp_gt_u32_e32 vcc, 3, v7\ns_and_saveexec_b64 s[4:5], vcc",
        "line 4: .*reads vcc_lo, vcc_hi, which",
    ),
    "one lane": ("v_readfirstlane_b32 s5, v7", "reads v7, which"),
    "an accumulator": (
        "v_mov_b32_e32 v2, 0\nv_accvgpr_read_b32 v3, a5\nglobal_store_dword v2, v3, s[0:1]",
        "reads v3, which",
    ),
    "lds": ("v_mov_b32_e32 v2, 0\nds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)", "read of LDS byte 0"),
}


@pytest.mark.parametrize("what", UNDEFINED)
@pytest.mark.parametrize("lazy", [False, True])
def test_undefined_values_raise(what, lazy):
    text, message = UNDEFINED[what]
    with pytest.raises(EmuError, match=message):
        execute(text + "\ns_endpgm\n", waves=1, shared=64, lazy=lazy)


def test_lds_of_an_earlier_workgroup_counts_as_unwritten():
    text = (
        "v_lshlrev_b32_e32 v3, 2, v0\ns_cmp_eq_u32 s2, 0\ns_cbranch_scc0 read\n"
        "ds_write_b32 v3, v0\n"
        "s_waitcnt lgkmcnt(0)\nread:\nds_read_b32 v2, v3\ns_waitcnt lgkmcnt(0)\ns_endpgm\n"
    )
    kernel = Kernel(text, "gfx942")
    kernel.program.descriptor |= {"user_sgpr_count": 2, "system_sgpr_workgroup_id_x": 1}
    kernel.run((1,), [], 256, 1)
    with pytest.raises(EmuError, match="nothing has written, issued by line 7: ds_read"):
        kernel.run((2,), [], 256, 1)


def test_an_undefined_high_half_that_no_result_depends_on():
    """LLVM adds a 64-bit register whose high half is undefined and uses only the low result."""
    text = (
        "v_mov_b32_e32 v4, 2\nv_mad_u64_u32 v[6:7], s[4:5], v0, 3, v[4:5]\nv_mov_b32_e32 v2, v6\n"
    )
    out, _ = execute(text + STORE_V2, waves=1)
    assert np.array_equal(out, np.arange(64) * 3 + 2)
    with pytest.raises(EmuError, match="reads v2, which"):
        execute(text.replace("v2, v6", "v2, v7") + STORE_V2, waves=1)


def test_a_stored_lane_nothing_has_written():
    text = "v_cmp_gt_u32_e32 vcc, 9, v0\ns_and_saveexec_b64 s[6:7], vcc\nv_mov_b32_e32 v2, 1\n"
    text += "s_or_b64 exec, exec, s[6:7]\n"
    with pytest.raises(EmuError, match="stores a lane of a register that nothing has written"):
        execute(text + STORE_V2, waves=1)


def test_overwriting_a_register_whose_load_is_outstanding():
    text = "v_mov_b32_e32 v1, 0\nglobal_load_dword v2, v1, s[0:1]\nv_mov_b32_e32 v2, 1\n"
    with pytest.raises(EmuError, match="overwrites v2 without waiting for line 4: global_load"):
        execute(text + STORE_V2, waves=1)


def test_errors_name_the_python_line():
    text = "\t.loc\t1 17 4    ; kernel.py:17:4 @[ other.py:3:1 ]\n\tv_mov_b32_e32 v2, 0\n"
    with pytest.raises(EmuError, match=r"line 5 \(kernel.py:17\): ds_read_b32 v3, v2: "):
        execute(text + "\tds_read_b32 v3, v2\ns_endpgm\n", waves=1, shared=0, lazy=False)


def test_scalar_values():
    lanes = np.arange(128) % 5 == 0
    mask = LaneMask(lanes)
    assert uniform([4, 4]) == 4
    assert uniform([4, 5]) == (4, 5)
    words = per_wave(mask, 2)
    assert [w >> 5 & 1 for w in words] == [1, 0]
    assert np.array_equal(mask_lanes(words, 2), lanes)
    assert np.array_equal(take_waves(mask, [1]).lanes, lanes[64:])
    assert take_waves((3, 4, 5), [0, 2]) == (3, 5)
    wave = run("s_mov_b64 vcc, exec\ns_mov_b32 s4, vcc_hi", exec_=0x123456789ABCDEF0)
    assert wave.sgprs[4] == 0x12345678
