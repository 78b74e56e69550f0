"""Decode and prefill of a small full-dimension stack in transformers, eager and compiled.

    python -m bench.layer_peer --config config.json --layers 4 --batches 1,32 --context 1024

The peer of `inkling-rocm bench layer` on the same sizes; for speed only: weights are random and
transformers routes in the model dtype. Times are of generate's steps divided by the layers, so they
hold the head too: keep --vocab small. One JSON row a case goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.rows import provenance
from inkling_rocm.bench.rows import machine
from inkling_rocm.config import TextConfig, load_config


def text_fields(text: TextConfig, vocab: int) -> dict[str, Any]:
    """The text model in transformers' words, with a small vocabulary."""
    glob, local, moe = text.global_attention, text.local_attention, text.moe
    assert moe is not None
    kinds = {True: "hybrid_sliding", False: "hybrid"}
    return {
        "model_type": "inkling_text",
        "vocab_size": vocab,
        "unpadded_vocab_size": vocab,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": glob.num_heads,
        "num_key_value_heads": glob.num_kv_heads,
        "head_dim": glob.head_dim,
        "swa_num_attention_heads": local.num_heads,
        "swa_num_key_value_heads": local.num_kv_heads,
        "swa_head_dim": local.head_dim,
        "sliding_window_size": local.window,
        "d_rel": glob.d_rel,
        "rel_extent": glob.extent,
        "log_scaling_n_floor": glob.log_floor,
        "layer_types": [kinds[flag] for flag in text.layer_is_local],
        "mlp_layer_types": ["sparse" if flag else "dense" for flag in text.layer_is_moe],
        "intermediate_size": text.dense_intermediate_size,
        "moe_intermediate_size": moe.intermediate_size,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.num_shared_experts,
        "max_position_embeddings": text.context_length,
        "pad_token_id": None,
    }


def build(text: TextConfig, vocab: int, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """A randomly initialised model, made on the device."""
    from transformers import InklingConfig, InklingForConditionalGeneration

    config = InklingConfig(
        text_config=text_fields(text, vocab),
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 4},
        vision_config={"patch_size": 4, "num_hidden_layers": 2},
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return InklingForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(before)


def timed(model: torch.nn.Module, ids: torch.Tensor, new_tokens: int) -> float:
    """Seconds of one greedy generate."""
    if ids.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    model.generate(
        ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--modes", default="eager,compiled")
    options = parser.parse_args()
    text = load_config(Path(options.config), {"num_hidden_layers": options.layers}).text
    model = build(text, options.vocab, options.device, getattr(torch, options.dtype))
    for mode in options.modes.split(","):
        if mode == "compiled":
            model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
        for batch in map(int, options.batches.split(",")):
            ids = torch.randint(options.vocab, (batch, options.context), device=options.device)
            timed(model, ids, options.new_tokens)
            first = statistics.median(timed(model, ids, 1) for _ in range(3))
            whole = statistics.median(timed(model, ids, options.new_tokens) for _ in range(3))
            step = (whole - first) / (options.new_tokens - 1)
            row = {
                "op": "layer_peer",
                "case": f"decode, batch {batch}, context {options.context}",
                "peer": f"transformers {mode}",
                "layers": options.layers,
                "dtype": options.dtype,
                "us_per_layer": round(step * 1e6 / options.layers, 1),
                "prefill_us_per_layer": round(first * 1e6 / options.layers, 1),
                **machine(torch.device(options.device)),
                **provenance(),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
