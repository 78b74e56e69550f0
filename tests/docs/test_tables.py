"""Every number in README and docs comes from a row: the tables are what bench/results says."""

from bench.rows import RESULTS
from bench.tables import BLOCK, TABLES, documents, render


def test_tables_are_up_to_date():
    named = set()
    for file in documents():
        text = file.read_text(encoding="utf-8")
        named |= {match[2] for match in BLOCK.finditer(text)}
        assert render(text) == text, f"{file.name}: run `python -m bench.tables`"
    assert named == set(TABLES)


def test_every_row_says_where_it_comes_from():
    import json

    for file in RESULTS.glob("*.jsonl"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            missing = {"op", "case", "device", "arch", "evidence", "commit", "versions"} - set(row)
            assert not missing, f"{file.name}:{number} lacks {missing}"
            assert row["evidence"] in ("measured", "emulated", "modelled")
