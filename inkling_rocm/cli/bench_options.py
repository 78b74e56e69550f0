"""What the bench commands' options share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OutputFile = Annotated[
    Path | None, typer.Option(help="Append result rows to this file, one JSON object a line.")
]
Seed = Annotated[int, typer.Option(help="Of prompts, lengths and arrivals; of dummy weights.")]


def numbers(text: str, option: str) -> list[int]:
    """Positive numbers, separated by commas. Raises: typer.BadParameter."""
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text!r}: wanted numbers, as 1,8,32") from error
    if any(n < 1 for n in found):
        raise typer.BadParameter(f"{option} {text!r}: wanted at least 1")
    return found
