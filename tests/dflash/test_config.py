"""A draft's config.json: what is read, and that everything else is refused by its name."""

import re
from dataclasses import replace

import pytest

from inkling_rocm import config_keys
from inkling_rocm.checkpoint.dflash import dflash_json, random_dflash, write_random_dflash
from inkling_rocm.config_dflash import load_dflash_config, parse_dflash_config
from tests.engine.tiny import tiny_config

TEXT = tiny_config().text

# The keys and shapes of drafts that are published for other models, in a tiny size.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 155, "target_layer_ids": [0, 2]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["full_attention", "sliding_attention"],
    "max_position_embeddings": 4096,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 3,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 32,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 150,
}


def parse(**changes):
    """PUBLISHED with keys replaced; those of value `...` are left out."""
    merged = {**PUBLISHED, **changes}
    return parse_dflash_config({k: v for k, v in merged.items() if v is not ...})


def block(**changes):
    return {"dflash_config": {**PUBLISHED["dflash_config"], **changes}}


def test_a_published_config():
    config = parse()
    assert config.windows == (0, 32)
    assert config.causal == (False, True)
    assert config.target_layer_ids == (0, 2)
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (16, 155, 1e6)
    config.check_target(TEXT)


def test_older_and_newer_places_of_a_key():
    moved = parse(
        block_size=..., num_target_layers=..., **block(block_size=16, num_target_layers=3)
    )
    assert moved == parse()
    top = parse(mask_token_id=155, target_layer_ids=[0, 2], dflash_config=...)
    assert top == parse()
    theta = parse(rope_theta=..., rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert theta == parse(rope_scaling={"type": "default"}) == parse()
    assert parse(torch_dtype="bfloat16", dtype=...) == parse()


def test_which_positions_of_the_block_are_seen():
    assert parse(layer_types=..., use_sliding_window=False).causal == (False, False)
    assert parse(is_causal=True).causal == (True, True)
    assert parse(is_causal=False).causal == (False, False)
    assert parse(**block(causal=True)).causal == (True, True)
    assert parse(is_causal=None).causal == (False, True)
    with pytest.raises(ValueError, match=r"is_causal is True but dflash_config.causal is False"):
        parse(is_causal=True, **block(causal=False))


REFUSALS = [
    ({"architectures": ["DFlash2DraftModel"]}, r"architectures is \['DFlash2DraftModel'\]"),
    ({"architectures": ...}, "architectures is None"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling.rope_type is 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling.rope_type is 'linear'"),
    ({"rope_scaling": {"mrope_section": [8, 8]}}, r"rope_scaling.mrope_section .* unknown"),
    ({"rope_scaling": 2.0}, "rope_scaling is 2.0"),
    ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is given as"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    (
        {"layer_types": ["full_attention", "linear_attention"]},
        "layer_types is .*'linear_attention'",
    ),
    ({"layer_types": ["full_attention"]}, "wanted 2 entries"),
    ({"layer_types": ...}, "use_sliding_window is true but layer_types is missing"),
    ({"sliding_window": None}, "sliding_window is missing"),
    ({"sliding_window": 8, "is_causal": False}, "sliding_window is 8, smaller than block_size 16"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ({"block_size": 1}, "block_size is 1"),
    ({"block_size": ...}, "block_size is missing"),
    ({"dtype": "float8"}, "dtype is 'float8'"),
    ({"quantization_config": {"quant_algo": "FP8"}}, "quantization_config describes a quantised"),
    ({"projector_type": "domino"}, "projector_type is 'domino'"),
    (block(projector_type="dspark"), "projector_type is 'dspark'"),
    (block(gru_hidden_dim=64), "dflash_config.gru_hidden_dim .* unknown"),
    (block(attention_mode="mla"), "attention_mode is 'mla'"),
    (block(mask_token_id=None, mask_token="<m>"), "mask_token_id is missing"),
    (block(mask_token_id=-1), "mask_token_id is -1"),
    (block(target_layer_ids=None), "target_layer_ids is missing"),
    (block(target_layer_ids=[]), r"target_layer_ids is \[\]"),
    (block(target_layer_ids=[2, 0]), r"target_layer_ids is \[2, 0\]"),
    (block(target_layer_ids=[1, 1]), r"target_layer_ids is \[1, 1\]"),
    (block(target_layer_ids=[True, 2]), r"target_layer_ids is \[True, 2\]"),
    (block(block_size=8), "block_size is 8 but block_size at top level is 16"),
    ({"dflash_config": [1]}, r"dflash_config is \[1\], wanted an object"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=lambda x: x if type(x) is str else "")
def test_refusals_name_the_key(change, message):
    with pytest.raises(ValueError, match=message):
        parse(**change)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("value", [True, 0, None, {"factor": 4}])
def test_unknown_keys(nested, value):
    change = block(noise_scale=value) if nested else {"noise_scale": value}
    with pytest.raises(ValueError, match=r"noise_scale.*unknown"):
        parse(**change)


@pytest.mark.parametrize(
    ("nested", "key"),
    [(False, k) for k in config_keys.DFLASH.must_equal]
    + [(True, k) for k in config_keys.DFLASH_BLOCK.must_equal],
)
def test_another_value_of_a_must_equal_key(nested, key):
    wanted = (config_keys.DFLASH_BLOCK if nested else config_keys.DFLASH).must_equal[key]
    parse(**(block(**{key: wanted}) if nested else {key: wanted}))
    other = not wanted if isinstance(wanted, bool) else "other" if type(wanted) is str else 3.5
    with pytest.raises(ValueError, match=rf"\b{key} is {re.escape(repr(other))}"):
        parse(**(block(**{key: other}) if nested else {key: other}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the target's is 32"),
        ({"num_target_layers": 5}, "num_target_layers is 5, the target's is 3"),
        ({"vocab_size": 99}, "vocab_size is 99, the target's is 150"),
        ({"target_layer_ids": (0, 3)}, r"target_layer_ids is \[0, 3\], but the target's layers"),
        ({"mask_token_id": 160}, "mask_token_id is 160, but the target's embedding has 160 rows"),
    ],
)
def test_a_draft_of_another_target(change, message):
    with pytest.raises(ValueError, match=message):
        replace(parse(), **change).check_target(TEXT)


def test_what_is_written_is_read_back(tmp_path):
    for config in (random_dflash(TEXT), replace(parse(is_causal=True), dtype="float32")):
        assert parse_dflash_config(dflash_json(config)) == config
    with pytest.raises(ValueError, match="cannot be written"):
        dflash_json(replace(random_dflash(TEXT), windows=(5, 64), causal=(True, True)))
    random_dflash(TEXT).check_target(TEXT)


@pytest.mark.parametrize("name", ["mask_embedding.pt", "hf_quant_config.json"])
def test_files_that_change_the_draft(tmp_path, name):
    folder = write_random_dflash(tmp_path / "draft", random_dflash(TEXT))
    assert load_dflash_config(folder) == random_dflash(TEXT)
    (folder / name).write_bytes(b"{}")
    with pytest.raises(ValueError, match=f"{name} .* not implemented"):
        load_dflash_config(folder)
    with pytest.raises(FileNotFoundError, match=r"config.json: no such file"):
        load_dflash_config(tmp_path)
