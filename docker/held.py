"""Holds an image's Python packages: writes down their versions, and fails when one has changed.

Usage: held.py require NAME VERSION | held.py write FILE | held.py check FILE
FILE is a pip constraints file, one `name==version` a line.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def installed() -> dict[str, str]:
    """Version of every installed distribution, by normalised name."""
    found: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name:
            # The first on the path is the one that is imported.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def require(name: str, version: str) -> str | None:
    """Why the image does not fit, or None. A local part (0.5.23+rocm) is the image's own."""
    got = installed().get(name)
    if got is None:
        return f"{name} is not installed: use an image that contains {name} {version}"
    if got.split("+")[0] != version:
        return (
            f"{name} is {got}, wanted {version}: inkling-rocm patches exactly that version; "
            f"choose the image of {version} (--build-arg BASE_IMAGE=...)"
        )
    return None


def changed(held: dict[str, str]) -> list[str]:
    """A line for every held package that is gone or has another version."""
    now = installed()
    return [
        f"{name}: was {version}, is {now.get(name, 'gone')}"
        for name, version in held.items()
        if now.get(name) != version
    ]


def main(arguments: list[str]) -> str | None:
    """Runs one command; returns the error to exit with."""
    match arguments:
        case ["require", name, version]:
            return require(name, version)
        case ["write", file]:
            lines = [f"{name}=={version}" for name, version in sorted(installed().items())]
            Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
            return None
        case ["check", file]:
            lines = Path(file).read_text(encoding="utf-8").split()
            differences = changed(dict(line.split("==", 1) for line in lines))
            if differences:
                return "the install changed the image's packages:\n" + "\n".join(differences)
            return None
    return __doc__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
