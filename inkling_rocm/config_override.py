"""Changing a parsed config.json before it is read: SGLang's --json-model-override-args."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inkling_rocm.config_keys import TEXT, TOP

# Lists with one item a layer.
_BY_LAYER = ("layer_types", "mlp_layer_types")


def parse_override(text: str) -> dict[str, Any]:
    """The object that the flag's JSON holds.

    Raises: ValueError: it is not one.
    """
    try:
        override = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"json_model_override_args {text!r} is not JSON: {error}") from error
    if not isinstance(override, dict):
        raise ValueError(f"json_model_override_args {text!r}: wanted an object")
    return override


def override_config(config_json: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """config_json with values replaced; sections are merged key by key.

    A key of the language model may stand at top level: {"num_hidden_layers": 8} is
    {"text_config": {"num_hidden_layers": 8}}. Fewer layers are the model's first ones: what lists
    them is cut to them.
    """
    merged = dict(config_json)
    text = dict(merged.get("text_config") or {})
    for key, value in override.items():
        if key == "text_config" and isinstance(value, Mapping):
            text.update(value)
        elif key in TEXT.read and key not in TOP.read:
            text[key] = value
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    layers = text.get("num_hidden_layers")
    given = {**override, **override.get("text_config", {})}
    if "num_hidden_layers" in given and isinstance(layers, int):
        for key in _BY_LAYER:
            if key not in given and isinstance(text.get(key), list):
                text[key] = text[key][:layers]
        if "local_layer_ids" not in given and isinstance(text.get("local_layer_ids"), list):
            text["local_layer_ids"] = [i for i in text["local_layer_ids"] if i < layers]
        if "dense_mlp_idx" not in given and isinstance(text.get("dense_mlp_idx"), int):
            text["dense_mlp_idx"] = min(text["dense_mlp_idx"], layers)
    merged["text_config"] = text
    return merged
