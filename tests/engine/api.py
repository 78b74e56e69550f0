"""What the tests of the Python API share."""

from inkling_rocm.engine import SamplingParams
from tests.engine.history_model import reference_tokens

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def reference(prompt, **params):
    return reference_tokens(prompt, SamplingParams(temperature=0.0, ignore_eos=True, **params))
