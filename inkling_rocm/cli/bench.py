"""`inkling-rocm bench`: mounts its commands."""

import typer

from inkling_rocm.cli.bench_layers import kernels, layer
from inkling_rocm.cli.bench_load import offline, serving

app = typer.Typer(
    name="bench",
    help="Measure ops, layers, the engine, or a server under load.",
    no_args_is_help=True,
)

app.command()(layer)
app.command()(kernels)
app.command()(offline)
app.command()(serving)
