"""The same facts in either dialect end in the same InklingConfig."""

import copy
import json

import pytest
from transformers import AutoConfig

from inkling_rocm.checkpoint.released_config import released_config
from inkling_rocm.config import load_config, parse_config


@pytest.fixture
def small_json(small_config_path):
    return json.loads(small_config_path.read_text())


@pytest.fixture
def inkling_json(small_config_path):
    return json.loads(small_config_path.with_name("inkling.json").read_text())


def _resaved(config_json, folder):
    """The released config.json after transformers read and wrote it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json))
    AutoConfig.from_pretrained(folder).save_pretrained(folder / "resaved")
    return folder / "resaved"


def test_inkling(inkling_json):
    config = parse_config(inkling_json)
    text = config.text
    assert (text.hidden_size, text.num_layers, text.mup_multiplier) == (6144, 66, 24.0)
    assert (text.vocab_size, text.unpadded_vocab_size) == (201024, 200058)
    assert (text.context_length, text.rms_norm_eps, text.conv_taps) == (1048576, 1e-6, 4)
    assert text.dense_intermediate_size == 24576
    assert text.layer_is_local == tuple((i + 1) % 6 != 0 for i in range(66))
    assert text.layer_is_moe == tuple(i >= 2 for i in range(66))
    moe = text.moe
    assert (moe.num_experts, moe.top_k, moe.num_shared_experts) == (256, 6, 2)
    assert (moe.intermediate_size, moe.route_scale) == (3072, 8.0)
    local, whole = text.local_attention, text.global_attention
    assert (local.num_heads, local.num_kv_heads, local.head_dim, local.d_rel) == (64, 16, 128, 16)
    assert (local.window, local.extent, local.log_floor) == (512, 512, None)
    assert (whole.num_heads, whole.num_kv_heads, whole.head_dim, whole.d_rel) == (64, 8, 128, 16)
    assert (whole.window, whole.extent) == (0, 1024)
    assert (whole.log_floor, whole.log_alpha, whole.softmax_scale) == (128000, 0.1, 1 / 128)
    assert text.attention(5) is whole
    assert text.attention(4) is local
    assert config.mtp.num_blocks == 8
    assert [i for i, x in enumerate(config.mtp.block_is_local) if x] == [0, 2, 4, 5, 6, 7]
    assert not config.mtp.chain_hidden_post_norm
    assert (config.audio.num_mel_bins, config.audio.num_levels) == (80, 16)
    vision = config.vision
    assert (vision.patch_size, vision.temporal_patch_size) == (40, 2)
    assert (vision.num_channels, vision.num_layers) == (3, 4)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (200006,))


def test_small(small_json):
    config = parse_config(small_json)
    text = config.text
    assert (text.hidden_size, text.num_layers, text.mup_multiplier) == (4096, 42, 16.0)
    assert (text.dense_intermediate_size, text.moe.intermediate_size) == (16384, 2048)
    assert (text.local_attention.num_kv_heads, text.global_attention.num_kv_heads) == (8, 8)
    assert text.layer_is_local.count(False) == 7


@pytest.mark.parametrize("name", ["small_json", "inkling_json"])
def test_transformers_resave_changes_nothing(name, request, tmp_path):
    released = request.getfixturevalue(name)
    folder = _resaved(released, tmp_path / "released")
    written = json.loads((folder / "config.json").read_text())
    assert "dense_intermediate_size" not in written["text_config"]  # it is the other dialect
    assert load_config(folder) == parse_config(released)


@pytest.mark.parametrize("name", ["small_json", "inkling_json"])
def test_released_config_is_the_inverse(name, request):
    """What we would write for a release is the published file, key for key."""
    released = request.getfixturevalue(name)
    assert released_config(parse_config(released)) == released


def test_mixed_dialects(small_json):
    """dense_intermediate_size decides what intermediate_size means, whatever else is there."""
    text = small_json["text_config"]
    text["max_position_embeddings"] = text.pop("model_max_length")
    text["conv_kernel_size"] = text.pop("sconv_kernel_size")
    text["mlp_layer_types"] = ["dense"] * 2 + ["sparse"] * 40
    text["moe_intermediate_size"] = 3072  # transformers' default, which transformers overrides too
    assert parse_config(small_json).text.moe.intermediate_size == 2048
    assert parse_config(small_json).text.dense_intermediate_size == 16384
    del text["dense_intermediate_size"]
    assert parse_config(small_json).text.moe.intermediate_size == 3072
    assert parse_config(small_json).text.dense_intermediate_size == 2048
    text["dense_intermediate_size"] = None  # null is absent
    assert parse_config(small_json).text.moe.intermediate_size == 3072


def test_layer_types_alone_may_mix_freely(small_json):
    text = small_json["text_config"]
    del text["local_layer_ids"], text["dense_mlp_idx"]
    text["layer_types"] = ["hybrid", "hybrid_sliding"] * 21
    text["mlp_layer_types"] = ["sparse", "dense"] * 21
    config = parse_config(small_json)
    assert config.text.layer_is_local == (False, True) * 21
    assert config.text.layer_is_moe == (True, False) * 21
    assert parse_config(released_config(config)) == config


def test_all_dense_has_no_moe(small_json):
    small_json["text_config"]["dense_mlp_idx"] = 42
    for key in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "route_scale"):
        del small_json["text_config"][key]
    config = parse_config(small_json)
    assert config.text.moe is None
    assert parse_config(released_config(config)) == config


def test_text_only(small_json):
    for key in ("audio_config", "vision_config", "mtp_config"):
        del small_json[key]
    config = parse_config(small_json)
    assert (config.audio, config.vision, config.mtp) == (None, None, None)


def test_defaults_of_optional_keys(small_json):
    text = small_json["text_config"]
    text["unpadded_vocab_size"] = None
    text["log_scaling_n_floor"] = None
    small_json["mtp_config"]["num_nextn_predict_layers"] = 0
    del text["torch_dtype"]
    config = parse_config(small_json)
    assert config.text.unpadded_vocab_size == 201024
    assert config.text.global_attention.log_floor is None
    assert config.mtp is None
    assert config.dtype == "bfloat16"


def test_mtp_keys_inside_text_config(small_json):
    wanted = parse_config(small_json).mtp
    mtp = small_json.pop("mtp_config")
    small_json["text_config"] |= {
        "num_mtp_layers": mtp["num_nextn_predict_layers"],
        "mtp_local_layer_ids": mtp["local_layer_ids"],
        "chain_hidden_post_norm": mtp["chain_hidden_post_norm"],
    }
    assert parse_config(small_json).mtp == wanted


def test_mtp_local_extent_of_the_window_is_accepted(small_json):
    wanted = parse_config(small_json)
    small_json["mtp_config"]["local_extent"] = 512
    assert parse_config(small_json) == wanted


@pytest.mark.parametrize(
    ("top", "text", "wanted"),
    [
        ("float32", "bfloat16", "float32"),
        ("torch.float16", None, "float16"),
        (None, "float32", "float32"),
    ],
)
def test_dtype_of_the_saved_weights_comes_first(small_json, top, text, wanted):
    small_json["dtype"], small_json["text_config"]["torch_dtype"] = top, text
    assert parse_config(small_json).dtype == wanted


@pytest.mark.parametrize(
    ("top", "generation", "wanted"),
    [
        (200006, None, (200006,)),
        ([200006, 199999], None, (200006, 199999)),
        (200006, {"eos_token_id": [199999, 200006]}, (200006, 199999)),
        (200006, {"eos_token_id": 199999}, (200006, 199999)),
        (None, {"eos_token_id": 199999}, (199999,)),
        # transformers derives such a file from text_config's default, an ordinary token.
        (200006, {"eos_token_id": 2, "_from_model_config": True}, (200006,)),
        (None, None, ()),
    ],
)
def test_eos(small_json, tmp_path, top, generation, wanted):
    small_json["eos_token_id"] = top
    (tmp_path / "config.json").write_text(json.dumps(small_json))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path).eos_token_ids == wanted


def test_parse_config_leaves_its_input_alone(small_json):
    before = copy.deepcopy(small_json)
    parse_config(small_json)
    assert small_json == before
