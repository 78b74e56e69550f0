import pytest

from tests.engine.history_model import ByteTokenizer, assert_empty, history_engine


@pytest.fixture(scope="module")
def engine():
    with history_engine(tokenizer=ByteTokenizer()) as engine:
        yield engine
        assert engine.drain(timeout=10)
        assert_empty(engine._core)
