"""Schemathesis over the OpenAPI document: no input makes a server error."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.server.context import ServerSettings
from tests.server.live import serving
from tests.server.scripted import saying

POSITIVE = schemathesis.GenerationMode.POSITIVE
MODEL = "m"  # short, so that generated names have a chance


@pytest.fixture(scope="module")
def scripted_api():
    engine = saying("<content_text>ok<content_model_end_sampling>")
    with serving(engine, ServerSettings(served_model_name=MODEL)) as live:
        yield schemathesis.openapi.from_url(f"{live.url}/openapi.json")


@pytest.fixture(scope="module")
def demo_api(demo_parts):
    # A short context bounds what an unlimited request generates.
    args = EngineArgs(model_path="demo", context_length=40, page_size=16)
    with (
        Engine(args, parts=demo_parts) as engine,
        serving(engine, ServerSettings(served_model_name=MODEL)) as live,
    ):
        yield schemathesis.openapi.from_url(f"{live.url}/openapi.json")


def fuzz(api, path, examples):
    """Send generated requests, valid and invalid ones, to the operations of one path."""
    operations = [result.ok() for result in api.get_all_operations()]
    chosen = [operation for operation in operations if operation.path == path]
    assert chosen, f"{path} is not in the document"
    for operation in chosen:
        # Without a body there is nothing that could be invalid.
        for mode in list(schemathesis.GenerationMode) if operation.body else [POSITIVE]:

            @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case):
                response = case.call(timeout=60)
                case.validate_response(response, checks=[not_a_server_error])
                assert response.status_code != 422  # FastAPI's own form of errors
                if response.status_code >= 400:
                    assert "error" in response.json()

            check()


PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/metrics",
]


def test_document(scripted_api):
    names = scripted_api.raw_schema["components"]["schemas"]
    assert {"ChatBody", "CompletionBody", "GenerateBody", "ErrorBody"} <= set(names)
    assert {result.ok().path for result in scripted_api.get_all_operations()} == set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_no_server_errors(scripted_api, path):
    fuzz(scripted_api, path, 15)


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
def test_no_server_errors_from_the_engine(demo_api, path):
    fuzz(demo_api, path, 300)
