"""Servers shared by the tests of this folder."""

import pytest

from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import load_parts
from inkling_rocm.server.metrics import PrometheusMetrics
from tests.server.live import serving


@pytest.fixture(scope="session")
def demo_parts():
    """The demo checkpoint, loaded once."""
    return load_parts(EngineArgs(model_path="demo"))


@pytest.fixture(scope="session")
def demo(demo_parts):
    """The demo checkpoint behind a live server."""
    metrics = PrometheusMetrics()
    args = EngineArgs(model_path="demo", page_size=16, max_running_requests=32)
    with (
        Engine(args, metrics=metrics, parts=demo_parts) as engine,
        serving(engine, observed=metrics) as live,
    ):
        yield live
