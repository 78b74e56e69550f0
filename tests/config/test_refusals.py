"""Whatever would be other mathematics is refused, and the message says which key."""

import json
import re
from dataclasses import fields

import pytest

from inkling_rocm import config_keys
from inkling_rocm.config import load_config, parse_config

SECTIONS = {
    "": config_keys.TOP,
    "text_config": config_keys.TEXT,
    "audio_config": config_keys.AUDIO,
    "vision_config": config_keys.VISION,
    "mtp_config": config_keys.MTP,
}
MUST_EQUAL = [(where, key) for where, table in SECTIONS.items() for key in table.must_equal]


@pytest.fixture
def small_json(small_config_path):
    return json.loads(small_config_path.read_text())


def _section(config_json, where):
    return config_json[where] if where else config_json


def _other(value):
    """A value that is not this one but of its type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "2"
    return 30.0 if value is None else ["OtherModel"]


@pytest.mark.parametrize(("where", "key"), MUST_EQUAL)
def test_another_value_of_a_must_equal_key(small_json, where, key):
    section, wanted = _section(small_json, where), SECTIONS[where].must_equal[key]
    section[key] = wanted
    parse_config(small_json)
    section[key] = _other(wanted)
    with pytest.raises(ValueError, match=rf"\b{key} is .*{re.escape(repr(wanted))}"):
        parse_config(small_json)


@pytest.mark.parametrize("where", SECTIONS)
@pytest.mark.parametrize("value", [True, 0, None, "yarn", {"factor": 4}])
def test_unknown_key(small_json, where, value):
    _section(small_json, where)["rope_scaling"] = value
    with pytest.raises(ValueError, match=r"rope_scaling.*unknown"):
        parse_config(small_json)


@pytest.mark.parametrize("where", SECTIONS)
def test_harmless_keys_change_nothing(small_json, where):
    wanted = parse_config(small_json)
    for key in SECTIONS[where].harmless - SECTIONS[where].must_equal.keys():
        _section(small_json, where)[key] = 12345
    assert parse_config(small_json) == wanted


def _is_refused(config_json):
    try:
        parse_config(config_json)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("where", SECTIONS)
def test_every_read_key_is_read(small_json, where):
    """A key filed as read that nothing reads would be ignored silently: give each a value no
    reader can accept, in either dialect."""
    other = json.loads(json.dumps(small_json))
    del other["text_config"]["dense_intermediate_size"]
    other["text_config"]["moe_intermediate_size"] = 2048
    assert not _is_refused(small_json)
    assert not _is_refused(other)
    for key in SECTIONS[where].read:
        for dialect in (small_json, other):
            changed = json.loads(json.dumps(dialect))
            _section(changed, where)[key] = -1.5
            if _is_refused(changed):
                break
        else:
            pytest.fail(f"{key} is never read")


@pytest.mark.parametrize("where", SECTIONS)
def test_a_key_is_of_one_kind(where):
    table = SECTIONS[where]
    assert not table.read & table.harmless
    assert not table.read & table.must_equal.keys()


@pytest.mark.parametrize("where", ["text_config", "audio_config", "vision_config", "mtp_config"])
def test_missing_keys_are_named(small_json, where):
    optional = {
        "unpadded_vocab_size", "log_scaling_n_floor", "torch_dtype", "decoder_dmodel",
        "chain_hidden_post_norm", "local_layer_ids" if where == "mtp_config" else "",
        "dense_intermediate_size",  # without it, moe_intermediate_size is what is missing
    }  # fmt: skip
    for key in (small_json[where].keys() & SECTIONS[where].read) - optional:
        changed = json.loads(json.dumps(small_json))
        del changed[where][key]
        with pytest.raises(ValueError, match=rf"{key}.*is missing"):
            parse_config(changed)


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("", {"model_type": None}, "model_type is None"),
        ("", {"text_config": None}, "text_config is missing"),
        ("", {"text_config": [1]}, "text_config is .* wanted an object"),
        ("", {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ("", {"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ("", {"eos_token_id": [1, -1]}, "eos_token_id"),
        ("text_config", {"hidden_size": 0}, "hidden_size is 0"),
        ("text_config", {"hidden_size": True}, "hidden_size is True"),
        ("text_config", {"hidden_size": 4096.0}, "hidden_size is 4096.0"),
        ("text_config", {"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ("text_config", {"route_scale": float("nan")}, "route_scale is nan"),
        ("text_config", {"logits_mup_width_multiplier": -1}, "logits_mup_width_multiplier"),
        ("text_config", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("text_config", {"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
        ("text_config", {"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ("text_config", {"swa_num_key_value_heads": 5}, "swa_num_key_value_heads 5"),
        ("text_config", {"unpadded_vocab_size": 201025}, "unpadded_vocab_size is 201025"),
        ("text_config", {"local_layer_ids": [0, 42]}, "local_layer_ids"),
        ("text_config", {"local_layer_ids": [0, 0]}, "local_layer_ids names an id twice"),
        ("text_config", {"local_layer_ids": "0"}, "local_layer_ids"),
        ("text_config", {"layer_types": ["hybrid"] * 42}, "local_layer_ids .*layer_types"),
        ("text_config", {"layer_types": ["full"] * 42}, "layer_types"),
        ("text_config", {"layer_types": ["hybrid"] * 41}, "layer_types"),
        ("text_config", {"mlp_layer_types": ["dense"] * 42}, "dense_mlp_idx .*mlp_layer_types"),
        ("text_config", {"dense_mlp_idx": 43}, "dense_mlp_idx is 43"),
        ("text_config", {"max_position_embeddings": 4096}, "model_max_length .*max_position"),
        ("text_config", {"conv_kernel_size": 3}, "sconv_kernel_size .*conv_kernel_size"),
        ("text_config", {"num_mtp_layers": 2}, "num_mtp_layers is 2"),
        ("text_config", {"chain_hidden_post_norm": True}, "chain_hidden_post_norm is True"),
        ("text_config", {"mtp_local_layer_ids": [0]}, "mtp_local_layer_ids is"),
        ("mtp_config", {"local_extent": 1024}, "local_extent is 1024"),
        ("mtp_config", {"local_layer_ids": [8]}, "mtp_config.local_layer_ids"),
        ("mtp_config", {"chain_hidden_post_norm": "x"}, "chain_hidden_post_norm is 'x'"),
        ("audio_config", {"decoder_dmodel": 6144}, "audio_config.decoder_dmodel is 6144"),
        ("vision_config", {"text_hidden_size": 1}, "vision_config.decoder_dmodel"),
        ("vision_config", {"num_channels": 1}, "n_channels is 3 but num_channels is 1"),
    ],
)
def test_bad_values(small_json, where, change, message):
    _section(small_json, where).update(change)
    with pytest.raises(ValueError, match=message):
        parse_config(small_json)


@pytest.mark.parametrize("where", ["", "text_config"])
def test_quantised(small_json, where):
    _section(small_json, where)["quantization_config"] = {"quant_method": "mxfp4"}
    with pytest.raises(ValueError, match=r"quantization_config.*quantised"):
        parse_config(small_json)


def test_nvfp4_marker_file(small_config_path, tmp_path):
    (tmp_path / "config.json").write_text(small_config_path.read_text())
    load_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json.*quantised"):
        load_config(tmp_path)


def test_files(small_config_path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 50_000)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="wanted an object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(small_config_path.read_text())
    (tmp_path / "generation_config.json").write_text("3")
    with pytest.raises(ValueError, match=r"generation_config\.json holds int, wanted an object"):
        load_config(tmp_path)


def test_errors_of_a_folder_name_it(small_json, tmp_path):
    small_json["text_config"]["q_bias"] = True
    (tmp_path / "config.json").write_text(json.dumps(small_json))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        load_config(tmp_path)


def test_config_objects_are_hashable_and_frozen(small_json):
    config = parse_config(small_json)
    assert hash(config) == hash(parse_config(small_json))
    with pytest.raises(AttributeError):
        setattr(config, fields(config)[0].name, None)
