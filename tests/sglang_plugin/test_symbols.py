"""The symbols of SGLang that the plugin depends on: unchanged, and a change would be found."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.sglang_plugin.run_engine import PYTHON, environment, needs_sglang

pytestmark = [pytest.mark.sglang, needs_sglang]

PROGRAM = """
import json
from dataclasses import replace
from inkling_rocm.sglang_plugin.symbols import SYMBOLS, check_symbols, drift_of
check_symbols()
found = {}
for symbol in SYMBOLS:
    changed = [replace(symbol, path=symbol.path + "_gone")]
    if symbol.parameters:
        changed.append(replace(symbol, parameters=("other", *symbol.parameters)))
    found[symbol.path] = [drift_of(symbol), *map(drift_of, changed)]
print(json.dumps(found))
"""


def test_the_installed_sglang_is_the_one_the_plugin_was_made_for():
    done = subprocess.run(
        [str(PYTHON), "-c", PROGRAM], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 20
    for path, (now, *drifted) in found.items():
        assert now is None, now
        assert all(path in drift for drift in drifted), (path, drifted)
