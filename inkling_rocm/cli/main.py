"""`inkling-rocm`: mounts the sub-commands.

Each command imports what it runs inside itself: `--help` must not wait for torch.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from inkling_rocm.cli.bench import app as bench
from inkling_rocm.cli.doctor import doctor
from inkling_rocm.cli.generate import generate
from inkling_rocm.cli.ops import ops
from inkling_rocm.cli.parity import parity
from inkling_rocm.cli.profile import profile
from inkling_rocm.cli.serve import serve
from inkling_rocm.cli.sglang_launch import launch, sglang_command
from inkling_rocm.cli.verify import verify

app = typer.Typer(
    name="inkling-rocm",
    help="Inkling, served on AMD Instinct first.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"inkling-rocm {version('inkling-rocm')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command()(serve)
app.command()(generate)
app.command()(ops)
app.command()(verify)
app.command()(parity)
app.command()(profile)
app.command()(doctor)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the console script."""
    if command := sglang_command(sys.argv[1:]):
        launch(command)
    app()
