"""Every key a checkpoint's config.json may hold, and typed access that names the key in each error.

A key is one of three kinds: read (its value ends in a dataclass), must-equal (another value would
be other mathematics than this project computes) or harmless (no effect on inference). Anything
else is refused: nobody can say what an unknown key changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """The keys of one object of config.json.

    Attributes:
        read: keys whose values are used.
        must_equal: key -> the only value whose mathematics is implemented.
        harmless: keys without an effect on inference, or that repeat what another key says.
    """

    read: frozenset[str]
    must_equal: Mapping[str, object]
    harmless: frozenset[str]


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Written by transformers into any object; they describe files, training or generation defaults.
_GENERAL = _keys(
    "_name_or_path architectures transformers_version model_type initializer_range use_cache "
    "return_dict output_attentions output_hidden_states problem_type id2label label2id "
    "chunk_size_feed_forward bos_token_id pad_token_id sep_token_id auto_map"
)

TOP = KeyTable(
    read=_keys("text_config audio_config vision_config mtp_config eos_token_id dtype torch_dtype"),
    must_equal={
        "model_type": "inkling_mm_model",
        "architectures": ["InklingForConditionalGeneration"],
        "tie_word_embeddings": False,
        "is_encoder_decoder": False,
    },
    # The ids mark media in a prompt; whoever renders the prompt takes them from the tokenizer.
    harmless=_GENERAL
    | _keys("image_token_id audio_token_id image_bos_token_id audio_bos_token_id"),
)

TEXT = KeyTable(
    read=_keys(
        "hidden_size num_hidden_layers vocab_size unpadded_vocab_size model_max_length "
        "max_position_embeddings rms_norm_eps sconv_kernel_size conv_kernel_size "
        "intermediate_size dense_intermediate_size moe_intermediate_size "
        "logits_mup_width_multiplier num_attention_heads num_key_value_heads head_dim "
        "swa_num_attention_heads swa_num_key_value_heads swa_head_dim sliding_window_size d_rel "
        "rel_extent log_scaling_n_floor log_scaling_alpha local_layer_ids layer_types "
        "dense_mlp_idx mlp_layer_types n_routed_experts num_experts_per_tok n_shared_experts "
        "route_scale num_mtp_layers mtp_local_layer_ids chain_hidden_post_norm "
        "dtype torch_dtype"
    ),
    must_equal={
        "q_bias": False,
        "o_bias": False,
        "use_embed_norm": True,
        "use_sconv": True,
        "final_logit_softcapping": None,
        "shared_expert_sink": True,
        "use_gate_bias": True,
        "gate_activation": "sigmoid",
        "norm_after_topk": True,
        "use_global_scale": True,
        "hidden_act": "silu",
        "mtp_hidden_states_first": True,
        "number_of_conv_states": 4,
        "tie_word_embeddings": False,
        "is_encoder_decoder": False,
    },
    # rms_norm_eps_moe_gate belongs to a norm that no implementation of the model has.
    # eos_token_id here is transformers' default of 2; the model's own is at top level.
    harmless=_GENERAL | _keys("rms_norm_eps_moe_gate attention_dropout eos_token_id"),
)

AUDIO = KeyTable(
    read=_keys("n_mel_bins mel_vocab_size decoder_dmodel text_hidden_size"),
    must_equal={
        "bias": False,
        "dmel_min_value": -7.0,
        "dmel_max_value": 2.0,
        "use_audio_norm": True,
        "audio_mode": "dmel",
        "rms_norm_eps": 1e-6,
    },
    harmless=_GENERAL | _keys("dtype torch_dtype eos_token_id"),
)

VISION = KeyTable(
    read=_keys(
        "patch_size temporal_patch_size n_channels num_channels n_layers num_hidden_layers "
        "decoder_dmodel text_hidden_size"
    ),
    must_equal={"vision_encoder_type": "hmlp", "use_vision_norm": True, "rms_norm_eps": 1e-6},
    # An hMLP tower has neither a width of its own nor heads; transformers writes defaults for both.
    harmless=_GENERAL | _keys("hidden_size num_attention_heads dtype torch_dtype eos_token_id"),
)

MTP = KeyTable(
    read=_keys("num_nextn_predict_layers local_layer_ids chain_hidden_post_norm local_extent"),
    must_equal={},
    harmless=frozenset(),
)

# A DFlash draft's config.json (config_dflash.py): a Qwen3-like decoder, what makes it a block
# drafter in `dflash_config` or, in older files, at top level.
_DFLASH_BLOCK = _keys(
    "target_layer_ids mask_token_id mask_token block_size num_target_layers projector_type"
)

DFLASH = KeyTable(
    read=_DFLASH_BLOCK
    | _keys(
        "dflash_config architectures hidden_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim intermediate_size rms_norm_eps rope_theta rope_parameters "
        "rope_scaling layer_types sliding_window use_sliding_window is_causal "
        "max_position_embeddings vocab_size dtype torch_dtype"
    ),
    must_equal={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_sink_bias": False,
        "use_gemma_norm": False,
        "partial_rotary_factor": 1.0,
        "is_neox_style": True,
        "rope_is_neox_style": True,
        "has_embed_tokens": False,
        "has_lm_head": False,
        "is_encoder_decoder": False,
    },
    # Embedding and head are the target's, tied or not; max_window_layers only matters where
    # layer_types is absent, and then use_sliding_window must be false.
    harmless=_GENERAL
    | _keys("attention_dropout eos_token_id tie_word_embeddings max_window_layers"),
)

DFLASH_BLOCK = KeyTable(
    read=_DFLASH_BLOCK | _keys("causal"),
    must_equal={
        "attention_mode": "gqa",
        "attention_sink_bias": False,
        "attention_value_scale": None,
        "sample_from_anchor": True,
        "use_swa": False,
        # DFlash2's convolutions, candidate selector and logit transform.
        "conv_kernel_size": 0,
        "conv_group_size": 0,
        "selector_rank": 0,
        "selector_top_k": 0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
    },
    harmless=frozenset(),
)

ROPE = KeyTable(
    read=_keys("rope_theta rope_type type"),
    must_equal={"partial_rotary_factor": 1.0},
    harmless=frozenset(),
)

QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")


class Section:
    """One object of config.json: `where` is its path for error messages ("" at the top)."""

    def __init__(self, values: Any, where: str, table: KeyTable) -> None:
        self.where = where
        if not isinstance(values, Mapping):
            raise ValueError(f"config.json: {where or 'the file'} is {values!r}, wanted an object")
        self.values = values
        self._check(table)

    def label(self, key: str) -> str:
        return f"config.json: {self.where}.{key}" if self.where else f"config.json: {key}"

    def _check(self, table: KeyTable) -> None:
        for key in QUANTISATION_KEYS:
            if self.values.get(key) is not None:
                raise ValueError(
                    f"{self.label(key)} describes a quantised checkpoint; only bf16, fp16 and fp32 "
                    f"weights load so far. Point to the unquantised checkpoint."
                )
        for key, value in self.values.items():
            if key in table.must_equal:
                wanted = table.must_equal[key]
                if value != wanted:
                    raise ValueError(
                        f"{self.label(key)} is {value!r}; only {wanted!r} is implemented, another "
                        f"value changes the mathematics of the model"
                    )
            elif (
                key not in table.read and key not in table.harmless and key not in QUANTISATION_KEYS
            ):
                raise ValueError(
                    f"{self.label(key)} ({value!r}) is unknown and may change the mathematics; "
                    f"known keys are listed in inkling_rocm/config_keys.py. Remove it only if it "
                    f"has no effect on inference."
                )

    def pick(self, *names: str) -> tuple[str, Any]:
        """The value that goes by any of these names; null counts as absent.

        Returns: (name, value), or (first name, None) when all are absent.
        Raises:  ValueError: two of the names are there and disagree.
        """
        found = [(n, self.values[n]) for n in names if self.values.get(n) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ValueError(
                    f"{self.label(found[0][0])} is {found[0][1]!r} but {name} is {value!r}; both "
                    f"name the same thing, so they must agree"
                )
        return found[0] if found else (names[0], None)

    def required(self, *names: str) -> tuple[str, Any]:
        name, value = self.pick(*names)
        if value is None:
            raise ValueError(f"{self.label(' / '.join(names))} is missing")
        return name, value

    def integer(self, *names: str, minimum: int = 1) -> int:
        name, value = self.required(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{self.label(name)} is {value!r}, wanted an integer >= {minimum}")
        return value

    def optional_integer(self, *names: str, minimum: int = 1) -> int | None:
        return None if self.pick(*names)[1] is None else self.integer(*names, minimum=minimum)

    def number(self, *names: str, minimum: float, exclusive: bool = False) -> float:
        """A finite float >= minimum, or > minimum when exclusive."""
        name, value = self.required(*names)
        good = (
            not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
        )
        if not good or value < minimum or (exclusive and value == minimum):
            sign = ">" if exclusive else ">="
            raise ValueError(f"{self.label(name)} is {value!r}, wanted a number {sign} {minimum}")
        return float(value)

    def boolean(self, *names: str, default: bool) -> bool:
        name, value = self.pick(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.label(name)} is {value!r}, wanted true or false")
        return value

    def index_flags(self, key: str, count: int) -> tuple[bool, ...]:
        """A list of indices below `count` as one flag an index."""
        ids = self.required(key)[1]
        bad = not isinstance(ids, Sequence) or isinstance(ids, str)
        if bad or any(
            isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in ids
        ):
            raise ValueError(
                f"{self.label(key)} is {ids!r}, wanted a list of ids in 0..{count - 1}"
            )
        if len(set(ids)) != len(ids):
            raise ValueError(f"{self.label(key)} names an id twice: {ids!r}")
        return tuple(i in set(ids) for i in range(count))

    def name_flags(self, key: str, count: int, true: str, false: str) -> tuple[bool, ...]:
        """A list of `count` names, each `true` or `false`, as flags."""
        names = self.required(key)[1]
        bad = not isinstance(names, Sequence) or isinstance(names, str)
        if bad or len(names) != count or any(n not in (true, false) for n in names):
            raise ValueError(
                f"{self.label(key)} is {names!r}, wanted {count} entries of {true!r} or {false!r}"
            )
        return tuple(n == true for n in names)
