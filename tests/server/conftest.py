"""Servers shared by the tests of this folder."""

import pytest

from inkling_rocm.engine import Engine
from inkling_rocm.server.metrics import PrometheusMetrics
from tests.server.live import serving


@pytest.fixture(scope="session")
def demo():
    """The demo checkpoint behind a live server."""
    metrics = PrometheusMetrics()
    with (
        Engine(model_path="demo", metrics=metrics, page_size=16, max_running_requests=32) as engine,
        serving(engine, observed=metrics) as live,
    ):
        yield live
