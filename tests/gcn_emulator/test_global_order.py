"""Global stores and barriers: an s_barrier alone does not order them between waves."""

import numpy as np
import pytest
from test_waves import execute, scheduling  # noqa: F401

from gcn_emulator import EmuError, Kernel

WAIT = "s_waitcnt vmcnt(0)\n"
SETUP = "v_lshlrev_b32_e32 v3, 2, v0\nv_xor_b32_e32 v4, 0x100, v3\n"
STORE = {
    "global": "global_store_dword v3, v0, s[0:1]\n",
    "atomic": "global_atomic_add v3, v0, s[0:1]\n",
}
LOAD = {
    "global": "global_load_dword v2, v4, s[0:1]\n",
    "atomic": "v_mov_b32_e32 v2, 0\nglobal_atomic_add v2, v4, v2, s[0:1] sc0\n",
    "lds": "s_mov_b32 m0, 0\nglobal_load_lds_dword v4, s[0:1]\n",
}
RESULT = "global_store_dword v3, v2, s[0:1] offset:512\ns_endpgm\n"
MESSAGE = "global memory that wave [01] stored before the barrier without waiting"


def exchange(store, load, *, before="", after="", lazy=True):
    """128 lanes store their number and load that of the neighbouring wave -> what they got."""
    text = SETUP + STORE[store] + before + "s_barrier\n" + after + LOAD[load] + WAIT
    if load == "lds":
        text += "v_mov_b32_e32 v2, 0\n"
    memory = np.zeros(256, np.uint32)
    execute(text + RESULT, waves=2, shared=512, memory=memory, lazy=lazy)
    return memory[128:]


@pytest.mark.parametrize(("store", "load"), [("global", k) for k in LOAD] + [("atomic", "global")])
def test_a_barrier_does_not_order_a_store_nobody_waited_for(scheduling, store, load):  # noqa: F811
    with pytest.raises(EmuError, match=MESSAGE):
        exchange(store, load)


def test_a_wait_after_the_barrier_is_too_late(scheduling):  # noqa: F811
    with pytest.raises(EmuError, match=MESSAGE):
        exchange("global", "global", after=WAIT)


@pytest.mark.parametrize("after", ["", WAIT + "s_barrier\n"])
@pytest.mark.parametrize("store", STORE)
def test_the_wait_makes_it_right(scheduling, store, after):  # noqa: F811
    before = "" if after else WAIT
    out = exchange(store, "global", before=before, after=after)
    assert np.array_equal(out, np.arange(128) ^ 64)


def test_only_one_wave_stores(scheduling):  # noqa: F811
    text = SETUP + "v_readfirstlane_b32 s4, v0\ns_cmp_eq_u32 s4, 0\ns_cbranch_scc0 join\n"
    text += STORE["global"] + "{wait}join:\ns_barrier\n" + LOAD["global"] + WAIT + RESULT
    memory = np.zeros(256, np.uint32)
    with pytest.raises(EmuError, match="wave 0 stored before the barrier without waiting"):
        execute(text.format(wait=""), waves=2, memory=memory)
    execute(text.format(wait=WAIT), waves=2, memory=memory)
    assert np.array_equal(memory[192:], np.arange(64))


def test_a_wave_sees_its_own_stores(scheduling):  # noqa: F811
    text = SETUP + STORE["global"] + "s_barrier\nglobal_load_dword v2, v3, s[0:1]\n" + WAIT
    memory = np.zeros(256, np.uint32)
    execute(text + RESULT, waves=2, memory=memory)
    assert np.array_equal(memory[128:], np.arange(128))


def test_replicated_stores_of_one_value_are_no_hazard(scheduling):  # noqa: F811
    text = "v_and_b32_e32 v5, 63, v0\nv_lshlrev_b32_e32 v3, 2, v5\n"
    text += "global_store_dword v3, v5, s[0:1]\ns_barrier\nglobal_load_dword v2, v3, s[0:1]\n"
    memory = np.full(256, 77, np.uint32)
    execute(text + WAIT + RESULT, waves=2, memory=memory)
    assert np.array_equal(memory[128:192], np.arange(64))


def test_buffer_stores_outside_the_buffer_are_dropped(scheduling):  # noqa: F811
    text = SETUP + (
        "s_mov_b64 s[4:5], s[0:1]\ns_mov_b32 s6, 0x100\ns_mov_b32 s7, 0x27000\n"
        "buffer_store_dword v0, v3, s[4:7], 0 offen\ns_barrier\n"
        "buffer_load_dword v2, v3, s[4:7], 0 offen\n"
    )
    memory = np.zeros(256, np.uint32)
    execute(text + WAIT + RESULT, waves=2, memory=memory)
    assert np.array_equal(memory[128:192], np.arange(64))
    with pytest.raises(EmuError, match=MESSAGE):
        execute(
            text.replace("buffer_load_dword v2, v3", "buffer_load_dword v2, v4") + WAIT + RESULT,
            waves=2,
            memory=memory * 0,
        )


def test_without_lazy_waits_everything_is_in_order(scheduling):  # noqa: F811
    assert np.array_equal(exchange("global", "global", lazy=False), np.arange(128) ^ 64)


TICKET = (
    SETUP + "s_cmp_eq_u32 s2, 0\ns_cbranch_scc0 last\n"
    "global_store_dword v3, v0, s[0:1]\n{before}s_barrier\n"
    "v_readfirstlane_b32 s4, v0\ns_cmp_eq_u32 s4, {drawer}\ns_cbranch_scc0 done\n"
    "v_mov_b32_e32 v5, 0\nv_mov_b32_e32 v6, 1\ns_waitcnt vmcnt(0)\n"
    "global_atomic_add v5, v5, v6, s[0:1] offset:1016 sc0\ns_waitcnt vmcnt(0)\n{again}"
    "done:\ns_endpgm\n"
    "last:\n" + LOAD["global"] + WAIT + RESULT
)


def two_workgroups(text):
    """The first workgroup publishes 128 numbers with a ticket, the second reads them."""
    memory = np.zeros(256, np.uint32)
    address = memory.ctypes.data
    setup = f"s_mov_b32 s0, {address & 0xFFFFFFFF:#x}\ns_mov_b32 s1, {address >> 32:#x}\n"
    kernel = Kernel(setup + text, "gfx942")
    kernel.program.descriptor |= {"user_sgpr_count": 2, "system_sgpr_workgroup_id_x": 1}
    kernel.run((2,), [], 0, 2, regions=[memory])
    return memory[128:]


@pytest.mark.parametrize(("drawer", "other"), [(0, 1), (64, 0)])
def test_a_ticket_does_not_publish_what_other_waves_have_outstanding(drawer, other):
    text = TICKET.format(before="", drawer=drawer, again="")
    message = f"wave {other} of an earlier workgroup stored and had not waited for when it signal"
    with pytest.raises(EmuError, match=message):
        two_workgroups(text)


def test_a_ticket_after_every_wave_waited_publishes():
    text = TICKET.format(before=WAIT, drawer=0, again="")
    assert np.array_equal(two_workgroups(text)[:64], np.arange(64, 128))


def test_what_a_later_store_replaced_is_not_reported():
    """The reader finds what it stored itself."""
    text = TICKET.format(before="", drawer=0, again="")
    text = text.replace("last:\n", "last:\nv_add_u32_e32 v7, 9, v0\n"
                        "global_store_dword v4, v7, s[0:1]\n" + WAIT)  # fmt: skip
    assert np.array_equal(two_workgroups(text)[:64], np.arange(64) + 9)


def test_what_a_buffer_dropped_was_not_stored(scheduling):  # noqa: F811
    text = SETUP + (
        "s_mov_b64 s[4:5], s[0:1]\ns_mov_b32 s6, 0x100\ns_mov_b32 s7, 0x27000\n"
        "buffer_store_dword v0, v3, s[4:7], 0 offen\ns_barrier\n"
        "v_or_b32_e32 v4, 0x100, v3\nglobal_load_dword v2, v4, s[0:1]\n"
    )
    memory = np.full(256, 5, np.uint32)
    execute(text + WAIT + RESULT, waves=2, memory=memory)
    assert np.array_equal(memory[128:], np.full(128, 5))
