"""Reading a DFlash draft's config.json.

DFlash (arXiv:2602.06036) drafts a block of tokens in one forward: a small decoder whose keys and
values of confirmed positions come from features of the target model's layers. Variants whose
mathematics is not implemented (DFlash2's convolutions and selector, DSpark and Domino heads,
attention sinks, scaled rotary embeddings) are refused by the key that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inkling_rocm.config import DTYPES, read_json
from inkling_rocm.config_keys import DFLASH, DFLASH_BLOCK, ROPE, Section
from inkling_rocm.config_types import TextConfig

ARCHITECTURE = "DFlashDraftModel"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_TRAINED_MASK = "mask_embedding.pt"


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """A block drafter.

    Attributes:
        target_layer_ids: the target's layers whose taps are its features, ascending.
        block_size: tokens of a block: the token sampled last and the masked positions after it.
        mask_token_id: row of the target's embedding that stands at a masked position.
        windows: one a layer: visible keys including the current one; 0 = all earlier keys.
        causal: one a layer: whether a position of the block does not see those after it.
        context_length: positions it was made for. num_target_layers: of the target it was made
            for; None = it does not say. vocab_size: likewise.
        dtype: what the weights are meant to run in.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    context_length: int
    num_target_layers: int | None = None
    vocab_size: int | None = None
    dtype: str = "bfloat16"

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    def kv_bytes(self, itemsize: int) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def check_target(self, text: TextConfig) -> None:
        """Raises: ValueError: this draft was not made for that target."""
        wanted = {
            "hidden_size": (self.hidden_size, (text.hidden_size,)),
            "num_target_layers": (self.num_target_layers, (None, text.num_layers)),
            "vocab_size": (self.vocab_size, (None, text.vocab_size, text.unpadded_vocab_size)),
        }
        for key, (value, allowed) in wanted.items():
            if value not in allowed:
                raise ValueError(
                    f"draft config.json: {key} is {value}, the target's is {allowed[-1]}; the "
                    f"draft belongs to another model"
                )
        if self.target_layer_ids[-1] >= text.num_layers:
            raise ValueError(
                f"draft config.json: target_layer_ids is {list(self.target_layer_ids)}, but the "
                f"target's layers are 0..{text.num_layers - 1}"
            )
        if self.mask_token_id >= text.vocab_size:
            raise ValueError(
                f"draft config.json: mask_token_id is {self.mask_token_id}, but the target's "
                f"embedding has {text.vocab_size} rows"
            )


def load_dflash_config(path: str | Path) -> DFlashConfig:
    """Read a draft folder's config.json.

    Args:    path: the folder, or the config.json itself.
    Raises:  FileNotFoundError: no config.json. ValueError: a key or value that is not supported.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; wanted a draft folder's config.json")
    for name, what in (
        ("hf_quant_config.json", "marks a quantised checkpoint"),
        (_TRAINED_MASK, "replaces a row of the target's embedding"),
    ):
        if (file.parent / name).exists():
            raise ValueError(f"{file.parent / name} {what}, which is not implemented")
    try:
        return parse_dflash_config(read_json(file))
    except ValueError as error:
        raise ValueError(f"{file.parent}: {error}") from error


def parse_dflash_config(config_json: Mapping[str, Any]) -> DFlashConfig:
    """Turn a parsed config.json into a DFlashConfig.

    Raises: ValueError: names the key, its value and what was wanted.
    """
    architectures = config_json.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise ValueError(
            f"config.json: architectures is {architectures!r}; only [{ARCHITECTURE!r}] is "
            f"implemented as a draft"
        )
    top = Section(config_json, "", DFLASH)
    nested = top.pick("dflash_config")[1]
    block = Section({} if nested is None else nested, "dflash_config", DFLASH_BLOCK)
    merged = Section(_merge(top, block), "dflash_config", DFLASH_BLOCK)
    layers, heads = top.integer("num_hidden_layers"), top.integer("num_attention_heads")
    kv_heads = top.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads is {heads}, not a multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    hidden = top.integer("hidden_size")
    head_dim = top.optional_integer("head_dim") or hidden // heads
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim is {head_dim}, wanted an even number")
    block_size = merged.integer("block_size", minimum=2)
    windows = _windows(top, layers)
    causal = _causal(top, block, windows)
    if any(w and not c and w < block_size for w, c in zip(windows, causal, strict=True)):
        raise ValueError(
            f"config.json: sliding_window is {top.values['sliding_window']}, smaller than "
            f"block_size {block_size}; only with is_causal true is that implemented"
        )
    return DFlashConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=top.integer("intermediate_size"),
        rms_norm_eps=top.number("rms_norm_eps", minimum=0.0, exclusive=True),
        rope_theta=_rope_theta(top),
        target_layer_ids=_target_layers(merged),
        block_size=block_size,
        mask_token_id=_mask_token(merged),
        windows=windows,
        causal=causal,
        context_length=top.integer("max_position_embeddings"),
        num_target_layers=merged.optional_integer("num_target_layers"),
        vocab_size=top.optional_integer("vocab_size"),
        dtype=_dtype(top),
    )


def _merge(top: Section, block: Section) -> dict[str, Any]:
    """The block's facts, from dflash_config or top level; both must agree."""
    merged = {}
    for key in sorted(DFLASH_BLOCK.read & DFLASH.read):
        here, there = block.pick(key)[1], top.pick(key)[1]
        if here is not None and there is not None and here != there:
            raise ValueError(
                f"{block.label(key)} is {here!r} but {key} at top level is {there!r}; both name "
                f"the same thing, so they must agree"
            )
        merged[key] = there if here is None else here
    if merged["projector_type"] is not None:
        raise ValueError(
            f"{block.label('projector_type')} is {merged['projector_type']!r}; no projector head "
            f"(Domino, DSpark) is implemented"
        )
    return merged


def _target_layers(merged: Section) -> tuple[int, ...]:
    label, ids = merged.label("target_layer_ids"), merged.required("target_layer_ids")[1]
    good = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    if not good or not ids or ids != sorted(set(ids)):
        raise ValueError(f"{label} is {ids!r}, wanted layer numbers, ascending, none twice")
    return tuple(ids)


def _mask_token(merged: Section) -> int:
    if merged.pick("mask_token_id")[1] is None:
        raise ValueError(
            f"{merged.label('mask_token_id')} is missing; a mask_token by name is not looked up in "
            f"the tokenizer"
        )
    return merged.integer("mask_token_id", minimum=0)


def _windows(top: Section, layers: int) -> tuple[int, ...]:
    if top.pick("layer_types")[1] is None:
        if top.boolean("use_sliding_window", default=False):
            raise ValueError(
                "config.json: use_sliding_window is true but layer_types is missing, so which "
                "layers have a window is not said"
            )
        return (0,) * layers
    sliding = top.name_flags("layer_types", layers, _SLIDING, _FULL)
    window = top.integer("sliding_window") if any(sliding) else 0
    return tuple(window if flag else 0 for flag in sliding)


def _causal(top: Section, block: Section, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Stated for all layers, or full layers see the whole block and sliding ones are causal."""
    here, there = block.pick("causal")[1], top.pick("is_causal")[1]
    if here is None and there is None:
        return tuple(window > 0 for window in windows)
    if here is not None and there is not None and here != there:
        raise ValueError(
            f"config.json: is_causal is {there!r} but dflash_config.causal is {here!r}; both name "
            f"the same thing, so they must agree"
        )
    stated = top.boolean("is_causal", default=block.boolean("causal", default=False))
    return (stated,) * len(windows)


def _rope_theta(top: Section) -> float:
    """The base of the plain rotary embedding.

    Raises: ValueError: a scaled or partial one.
    """
    thetas = {}
    for key in ("rope_parameters", "rope_scaling"):
        values = top.pick(key)[1]
        if not isinstance(values, Mapping):
            if values is not None:
                raise ValueError(f"config.json: {key} is {values!r}, wanted an object or null")
            continue
        kind = values.get("rope_type", values.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"config.json: {key}.rope_type is {kind!r}; only 'default' is implemented, no "
                f"scaled rotary embedding"
            )
        section = Section(values, key, ROPE)
        if section.pick("rope_theta")[1] is not None:
            thetas[key] = section.number("rope_theta", minimum=0.0, exclusive=True)
    if top.pick("rope_theta")[1] is not None or not thetas:
        thetas["rope_theta"] = top.number("rope_theta", minimum=0.0, exclusive=True)
    if len(set(thetas.values())) > 1:
        raise ValueError(f"config.json: rope_theta is given as {thetas}, which must agree")
    return next(iter(thetas.values()))


def _dtype(top: Section) -> str:
    name, value = top.pick("dtype", "torch_dtype")
    dtype = "bfloat16" if value is None else str(value).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"{top.label(name)} is {value!r}, wanted one of {DTYPES}")
    return dtype
