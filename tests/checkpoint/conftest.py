import pytest

from inkling_rocm.config import parse_config
from tests.checkpoint import tiny


@pytest.fixture(scope="session")
def config():
    return parse_config(tiny.CONFIG_JSON)


@pytest.fixture(scope="session")
def tensors():
    """Released names to tensors; do not modify."""
    return tiny.released_tensors()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tensors):
    """A folder with those tensors in three shards; do not modify."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny"), tensors)
