"""What --speculative-* may say, and how many draft blocks that means."""

from dataclasses import replace

import pytest

from inkling_rocm.engine import EngineArgs
from inkling_rocm.engine.speculative.options import DEFAULT_STEPS, draft_depths
from tests.engine.tiny import tiny_config, tiny_mtp_config


def args(**fields):
    return EngineArgs(
        model_path="m", **{f"speculative_{name}": value for name, value in fields.items()}
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_steps": 2}, "num_steps means nothing without speculative_algorithm"),
        ({"use_rejection_sampling": True}, "means nothing without speculative_algorithm"),
        ({"algorithm": "MEDUSA"}, "'MEDUSA': choose from EAGLE, DFLASH"),
        ({"algorithm": "EAGLE", "num_steps": 0}, "num_steps 0: wanted at least 1"),
        ({"algorithm": "EAGLE", "eagle_topk": 4}, "eagle_topk 4: drafts are a chain"),
        ({"algorithm": "EAGLE", "num_steps": 3, "num_draft_tokens": 3}, "leave it out or give 4"),
        ({"algorithm": "EAGLE", "num_draft_tokens": 1}, "num_draft_tokens 1: wanted at least 2"),
        ({"algorithm": "EAGLE", "draft_model_path": "d"}, "inside the model's own checkpoint"),
    ],
)
def test_wrong_arguments_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        args(**fields)


def test_depths():
    config = tiny_mtp_config()
    assert draft_depths(args(), config) == 0
    assert draft_depths(args(algorithm="EAGLE"), config) == DEFAULT_STEPS
    assert draft_depths(args(algorithm="EAGLE", num_steps=8, eagle_topk=1), config) == 8
    assert draft_depths(args(algorithm="EAGLE", num_draft_tokens=3), config) == 2
    few = replace(config, mtp=replace(config.mtp, num_blocks=2, block_is_local=(True, False)))
    assert draft_depths(args(algorithm="EAGLE"), few) == 2


@pytest.mark.parametrize(("config", "blocks"), [(tiny_config(), 0), (tiny_mtp_config(), 8)])
def test_too_few_blocks(config, blocks):
    with pytest.raises(ValueError, match=f"needs 9 draft blocks; .* config.json has {blocks} "):
        draft_depths(args(algorithm="EAGLE", num_steps=9), config)
