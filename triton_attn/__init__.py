"""Paged Triton attention with a compile-time inlined score_mod, for any model."""

from triton_attn.decode import DecodeWorkspace, attention_decode, attention_verify
from triton_attn.prefill import attention_prefill
from triton_attn.score_mod import RelativeBias, RelativeProfile, ScoreMod, alibi, softcap

__all__ = [
    "DecodeWorkspace",
    "RelativeBias",
    "RelativeProfile",
    "ScoreMod",
    "alibi",
    "attention_decode",
    "attention_prefill",
    "attention_verify",
    "softcap",
]
