"""Scalar instructions against Python integer arithmetic."""

import pytest
from harness import EDGE_INTS, FULL, M32, RNG, exec_bits, run, signed

from gcn_emulator import EmuError

VALUES = EDGE_INTS + [int(x) for x in RNG.integers(0, 2**32, 12)]
PAIRS = [(a, b) for a in VALUES[::2] for b in VALUES[1::3]]
VALUES64 = [0, 1, FULL, 1 << 63, (1 << 63) - 1, 0xFFFFFFFF, 1 << 32] + [
    int(x) for x in RNG.integers(0, 2**63, 6)
]
S32 = range(-(2**31), 2**31)


def fits(value):
    return int(value not in S32)


def cmp(a, b, signed_=True):
    return (signed(a), signed(b)) if signed_ else (a, b)


# name -> f(a, b, scc) -> (result, scc or None when unchanged)
BINARY = {
    "s_add_u32": lambda a, b, c: (a + b, int(a + b > M32)),
    "s_sub_u32": lambda a, b, c: (a - b, int(b > a)),
    "s_addc_u32": lambda a, b, c: (a + b + c, int(a + b + c > M32)),
    "s_subb_u32": lambda a, b, c: (a - b - c, int(b + c > a)),
    "s_add_i32": lambda a, b, c: (a + b, fits(signed(a) + signed(b))),
    "s_sub_i32": lambda a, b, c: (a - b, fits(signed(a) - signed(b))),
    "s_mul_i32": lambda a, b, c: (a * b, None),
    "s_mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, c: (signed(a) * signed(b) >> 32, None),
    "s_min_i32": lambda a, b, c: (min(cmp(a, b)), int(signed(a) < signed(b))),
    "s_max_i32": lambda a, b, c: (max(cmp(a, b)), int(signed(a) > signed(b))),
    "s_min_u32": lambda a, b, c: (min(a, b), int(a < b)),
    "s_max_u32": lambda a, b, c: (max(a, b), int(a > b)),
    "s_and_b32": lambda a, b, c: (a & b, "nz"),
    "s_or_b32": lambda a, b, c: (a | b, "nz"),
    "s_xor_b32": lambda a, b, c: (a ^ b, "nz"),
    "s_andn2_b32": lambda a, b, c: (a & ~b, "nz"),
    "s_orn2_b32": lambda a, b, c: (a | ~b, "nz"),
    "s_nand_b32": lambda a, b, c: (~(a & b), "nz"),
    "s_nor_b32": lambda a, b, c: (~(a | b), "nz"),
    "s_xnor_b32": lambda a, b, c: (~(a ^ b), "nz"),
    "s_lshl_b32": lambda a, b, c: (a << (b % 32), "nz"),
    "s_lshr_b32": lambda a, b, c: (a >> (b % 32), "nz"),
    "s_ashr_i32": lambda a, b, c: (signed(a) >> (b % 32), "nz"),
    "s_lshl1_add_u32": lambda a, b, c: (a * 2 + b, int(a * 2 + b > M32)),
    "s_lshl2_add_u32": lambda a, b, c: (a * 4 + b, int(a * 4 + b > M32)),
    "s_lshl3_add_u32": lambda a, b, c: (a * 8 + b, int(a * 8 + b > M32)),
    "s_lshl4_add_u32": lambda a, b, c: (a * 16 + b, int(a * 16 + b > M32)),
    "s_absdiff_i32": lambda a, b, c: (abs(signed(a) - signed(b)), "nz"),
    "s_bfm_b32": lambda a, b, c: ((2 ** (a % 32) - 1) << (b % 32), None),
    "s_pack_ll_b32_b16": lambda a, b, c: (a % 65536 + b % 65536 * 65536, None),
    "s_pack_lh_b32_b16": lambda a, b, c: (a % 65536 + b // 65536 * 65536, None),
    "s_pack_hh_b32_b16": lambda a, b, c: (a // 65536 + b // 65536 * 65536, None),
    "s_cselect_b32": lambda a, b, c: (a if c else b, None),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    lines, want = [], []
    for scc in (0, 1):
        for a, b in PAIRS:
            wave = run(f"{name} s2, s0, s1", s={0: a, 1: b}, scc=scc)
            result, carry = BINARY[name](a, b, scc)
            result &= M32
            carry = {None: scc, "nz": int(result != 0)}.get(carry, carry)
            want.append((result, carry))
            lines.append((wave.sgprs[2], wave.scc))
    assert lines == want


def sext16(x):
    return signed(x, 16)


@pytest.mark.parametrize("imm", [0, 1, 5, 0x7FFF, 0x8000, 0xFFBF, 0xFFFF, 0xFF80])
@pytest.mark.parametrize("a", [*VALUES[::3], 2147483647, 4294967231])
def test_sopk_immediates_are_sign_extended(imm, a):
    """The bug behind the wrong sliding-window masks: s_movk_i32 s59, 0xffbf is -65."""
    assert run(f"s_movk_i32 s2, {imm:#x}").sgprs[2] == sext16(imm) & M32
    wave = run(f"s_addk_i32 s0, {imm:#x}", s={0: a})
    total = signed(a) + sext16(imm)
    assert (wave.sgprs[0], wave.scc) == (total & M32, fits(total))
    wave = run(f"s_mulk_i32 s0, {imm:#x}", s={0: a}, scc=1)
    assert (wave.sgprs[0], wave.scc) == (signed(a) * sext16(imm) & M32, 1)
    for scc in (0, 1):
        wave = run(f"s_cmovk_i32 s0, {imm:#x}", s={0: a}, scc=scc)
        assert wave.sgprs[0] == (sext16(imm) & M32 if scc else a)
    relations = {"eq": "==", "lg": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    for name, op in relations.items():
        wave = run(f"s_cmpk_{name}_i32 s0, {imm:#x}", s={0: a})
        assert wave.scc == int(eval(f"{signed(a)} {op} {sext16(imm)}"))
        wave = run(f"s_cmpk_{name}_u32 s0, {imm:#x}", s={0: a})
        assert wave.scc == int(eval(f"{a} {op} {imm}"))


@pytest.mark.parametrize("name", ["eq", "lg", "gt", "ge", "lt", "le"])
def test_compare(name):
    op = {"eq": "==", "lg": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}[name]
    for a, b in [*PAIRS, (7, 7)]:
        assert run(f"s_cmp_{name}_u32 s0, s1", s={0: a, 1: b}).scc == eval(f"{a} {op} {b}")
        wave = run(f"s_cmp_{name}_i32 s0, s1", s={0: a, 1: b})
        assert wave.scc == eval(f"{signed(a)} {op} {signed(b)}")
        if name in ("eq", "lg"):
            wave = run(f"s_cmp_{name}_u64 s[0:1], s[2:3]", s={0: a, 1: b, 2: a, 3: a})
            assert wave.scc == eval(f"{b} {op} {a}")
    assert run("s_cmp_lt_i32 s0, -1", s={0: 0xFFFFFFFE}).scc == 1
    assert run("s_cmp_lt_u32 s0, -1", s={0: 0xFFFFFFFE}).scc == 1


UNARY = {
    "s_mov_b32": lambda a: (a, None),
    "s_not_b32": lambda a: (~a, "nz"),
    "s_brev_b32": lambda a: (sum((a >> i & 1) << (31 - i) for i in range(32)), None),
    "s_abs_i32": lambda a: (abs(signed(a)), "nz"),
    "s_sext_i32_i8": lambda a: (signed(a, 8), None),
    "s_sext_i32_i16": lambda a: (signed(a, 16), None),
    "s_bcnt1_i32_b32": lambda a: (bin(a).count("1"), "nz"),
    "s_bcnt0_i32_b32": lambda a: (32 - bin(a).count("1"), "nz"),
    "s_ff1_i32_b32": lambda a: (next((i for i in range(32) if a >> i & 1), -1), None),
    "s_ff0_i32_b32": lambda a: (next((i for i in range(32) if not a >> i & 1), -1), None),
    "s_flbit_i32_b32": lambda a: (next((i for i in range(32) if a >> (31 - i) & 1), -1), None),
    "s_flbit_i32": lambda a: (
        next((i for i in range(32) if (a >> (31 - i) & 1) != a >> 31), -1),
        None,
    ),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    for a in VALUES:
        wave = run(f"{name} s2, s0", s={0: a}, scc=1)
        result, carry = UNARY[name](a)
        result &= M32
        assert wave.sgprs[2] == result
        assert wave.scc == (1 if carry is None else int(result != 0))


def test_64_bit():
    def pair(name, a, n, scc=0):
        s = {0: a & M32, 1: a >> 32, 2: n & M32, 3: n >> 32}
        wave = run(
            f"{name} s[4:5], s[0:1], {'s[2:3]' if name[-3:] == 'b64' else 's2'}", s=s, scc=scc
        )
        return wave.sgprs[4] | wave.sgprs[5] << 32, wave.scc

    def shift(name, a, n):
        s = {0: a & M32, 1: a >> 32, 2: n}
        wave = run(f"{name} s[4:5], s[0:1], s2", s=s)
        return wave.sgprs[4] | wave.sgprs[5] << 32, wave.scc

    for a in VALUES64:
        for b in VALUES64:
            for name, want in {
                "s_and_b64": a & b,
                "s_or_b64": a | b,
                "s_xor_b64": a ^ b,
                "s_andn2_b64": a & ~b & FULL,
                "s_xnor_b64": ~(a ^ b) & FULL,
            }.items():
                assert pair(name, a, b) == (want, int(want != 0))
            assert pair("s_cselect_b64", a, b, 1)[0] == a
            assert pair("s_cselect_b64", a, b, 0)[0] == b
        for n in (0, 1, 31, 32, 63, 64, 65):
            m = n % 64
            for name, want in {
                "s_lshl_b64": a << m & FULL,
                "s_lshr_b64": a >> m,
                "s_ashr_i64": signed(a, 64) >> m & FULL,
            }.items():
                assert shift(name, a, n) == (want, int(want != 0))
        assert run("s_bcnt1_i32_b64 s4, s[0:1]", s={0: a & M32, 1: a >> 32}).sgprs[4] == bin(
            a
        ).count("1")
        wave = run("s_not_b64 s[4:5], s[0:1]\ns_mov_b64 s[6:7], s[0:1]", s={0: a & M32, 1: a >> 32})
        assert wave.read_sgpr64(4) == ~a & FULL
        assert wave.read_sgpr64(6) == a
    assert run("s_mov_b64 s[0:1], 0xc000").read_sgpr64(0) == 0xC000
    assert run("s_mov_b64 s[0:1], -1").read_sgpr64(0) == FULL
    assert run("s_mov_b64 s[0:1], 1.0").read_sgpr64(0) == 0x3FF0000000000000
    assert run("s_mov_b32 s0, 1.0").sgprs[0] == 0x3F800000


def test_bit_fields():
    for a in VALUES:
        for offset, width in ((0, 0), (0, 1), (3, 5), (6, 2), (16, 16), (31, 1), (0, 32), (20, 20)):
            control = offset | width << 16
            field = (a >> offset) & ((1 << width) - 1)
            wave = run(f"s_bfe_u32 s2, s0, {control:#x}", s={0: a})
            assert (wave.sgprs[2], wave.scc) == (field, int(field != 0))
            if offset + width <= 32:
                want = (signed(field, width) if width else 0) & M32
                wave = run(f"s_bfe_i32 s2, s0, {control:#x}", s={0: a})
                assert (wave.sgprs[2], wave.scc) == (want, int(want != 0))
        for n in (0, 7, 31):
            assert run(f"s_bitcmp1_b32 s0, {n}", s={0: a}).scc == a >> n & 1
            assert run(f"s_bitcmp0_b32 s0, {n}", s={0: a}).scc == 1 - (a >> n & 1)


def test_exec_mask_instructions():
    mask, old = 0x00FF00FF12345678, 0xF0F0F0F0F0F0F0F0
    text = {"and": mask & old, "or": mask | old, "xor": mask ^ old, "andn2": mask & ~old}
    for name, want in text.items():
        wave = run(
            f"s_{name}_saveexec_b64 s[2:3], s[0:1]", s={0: mask & M32, 1: mask >> 32}, exec_=old
        )
        assert (exec_bits(wave), wave.read_sgpr64(2), wave.scc) == (
            want & FULL,
            old,
            int(want != 0),
        )
    wave = run("s_and_saveexec_b64 s[2:3], 0")
    assert (exec_bits(wave), wave.scc) == (0, 0)
    assert exec_bits(run("s_mov_b32 exec_hi, 0")) == M32


def test_branches():
    body = "s_mov_b32 s0, 1\n{} .L\ns_mov_b32 s0, 2\n.L:\ns_nop 0"
    taken = {
        "s_branch": {},
        "s_cbranch_scc0": {"scc": 0},
        "s_cbranch_scc1": {"scc": 1},
        "s_cbranch_vccz": {"vcc": 0},
        "s_cbranch_vccnz": {"vcc": 1 << 40},
        "s_cbranch_execz": {"exec_": 0},
        "s_cbranch_execnz": {"exec_": 2},
    }
    fallthrough = {
        "s_cbranch_scc0": {"scc": 1},
        "s_cbranch_scc1": {"scc": 0},
        "s_cbranch_vccz": {"vcc": 1},
        "s_cbranch_vccnz": {"vcc": 0},
        "s_cbranch_execz": {"exec_": 1},
        "s_cbranch_execnz": {"exec_": 0},
    }
    for name, state in taken.items():
        assert run(body.format(name), **state).sgprs[0] == 1, name
    for name, state in fallthrough.items():
        assert run(body.format(name), **state).sgprs[0] == 2, name
    run("s_barrier\ns_setprio 1\ns_waitcnt vmcnt(0) lgkmcnt(0)\nbuffer_inv sc1\nbuffer_wbl2 sc1")
    run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1")


def test_long_branches():
    """What LLVM emits for a branch beyond 128 KiB: s_getpc_b64, label arithmetic, s_setpc_b64."""
    text = (
        "s_mov_b32 s8, 0\n"
        ".LBB0_1:\n"
        "s_add_i32 s8, s8, 1\n"
        "s_cmp_ge_i32 s8, 5\n"
        "s_cbranch_scc1 .LBB0_3\n"
        "s_getpc_b64 s[0:1]\n"
        ".Lpost_getpc0:\n"
        "s_add_u32 s0, s0, (.LBB0_1-.Lpost_getpc0)&4294967295\n"
        "s_addc_u32 s1, s1, (.LBB0_1-.Lpost_getpc0)>>32\n"
        "s_setpc_b64 s[0:1]\n"
        ".LBB0_2:\n"
        "s_mov_b32 s9, 1\n"
        "s_endpgm\n"
        ".LBB0_3:\n"
        "s_mov_b32 s9, 2\n"
        "s_getpc_b64 s[2:3]\n"
        ".Lpost_getpc1:\n"
        "s_add_u32 s2, s2, (.LBB0_4-.Lpost_getpc1)&4294967295\n"
        "s_addc_u32 s3, s3, (.LBB0_4-.Lpost_getpc1)>>32\n"
        "s_setpc_b64 s[2:3]\n"
        "s_mov_b32 s9, 3\n"
        ".LBB0_4:\n"
    )
    wave = run(text, defined=False)
    assert wave.sgprs[8:10] == [5, 2]


def test_a_jump_to_no_instruction():
    with pytest.raises(EmuError, match=r"s_setpc_b64 .*jumps to 0x7"):
        run("s_mov_b64 s[0:1], 7\ns_setpc_b64 s[0:1]")
