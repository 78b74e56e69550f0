"""Parsed programs on disk."""

from gcn_emulator import cache
from gcn_emulator.parser import parse_program

ASM = """
\t.loc\t1 17 4    ; kernel.py:17:4
\tv_add_f32_e32 v0, v1, v2 ; a comment
again:
\tds_read_b64 v[2:3], v1 offset:8
\ts_cbranch_scc1 again
\ts_endpgm
"""


def test_a_cached_program_is_the_parsed_one(tmp_path, monkeypatch):
    first, sets = cache.load_program(ASM, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert first == parse_program(ASM)
    assert first.instructions[0].source == "kernel.py:17"
    monkeypatch.setattr(cache, "parse_program", _not_again)
    assert cache.load_program(ASM, tmp_path) == (first, sets)


def _not_again(asm):
    raise AssertionError("parsed again")


def test_a_damaged_file_is_replaced(tmp_path, monkeypatch):
    program, sets = cache.load_program(ASM, tmp_path)
    [path] = tmp_path.iterdir()
    good = path.read_bytes()
    for damage in (b"", good[:40], b"\x00" * 100):
        path.write_bytes(damage)
        assert cache.load_program(ASM, tmp_path) == (program, sets)
        with monkeypatch.context() as patch:
            patch.setattr(cache, "parse_program", _not_again)
            assert cache.load_program(ASM, tmp_path) == (program, sets)


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    program, _ = cache.load_program(ASM, blocked / "below")
    assert program.labels == {"again": 1}


def test_the_name_depends_on_the_code_that_parses(tmp_path, monkeypatch):
    cache.load_program(ASM, tmp_path)
    monkeypatch.setattr(cache, "_fingerprint", lambda: b"another parser")
    cache.load_program(ASM, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
