"""The same batch of prompts through a small full-dimension stack: this project's engine and
transformers, eager and compiled.

    python -m bench.small_stack --config config.json --layers 6 --batches 1,32 --out rows.jsonl

For speed only: weights are random and not the same (so are the experts that tokens choose), and
transformers routes in the model dtype, so there is nothing to compare outputs with; the gate says
"speed only". Prompts are computed, then --new-tokens are drawn greedily: a step is what one more
token costs, prefill the time until the first. One JSON row for each implementation and batch. Each
implementation has a process of its own, and with it the GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.rows import Rows
from inkling_rocm.config import TextConfig, load_config
from inkling_rocm.engine import Engine, EngineArgs
from kernel_base.arch import arch_of_device

IMPLEMENTATIONS = ("engine", "eager", "compiled")
# Draws so many tokens after the prompts ids_BT.
Generate = Callable[[torch.Tensor, int], object]


def text_fields(text: TextConfig) -> dict[str, Any]:
    """The text model in transformers' words."""
    glob, local, moe = text.global_attention, text.local_attention, text.moe
    assert moe is not None
    kinds = {True: "hybrid_sliding", False: "hybrid"}
    return {
        "model_type": "inkling_text",
        "vocab_size": text.vocab_size,
        "unpadded_vocab_size": text.unpadded_vocab_size,
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


def build(text: TextConfig, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """A randomly initialised transformers model, made on the device."""
    from transformers import InklingConfig, InklingForConditionalGeneration

    config = InklingConfig(
        text_config=text_fields(text),
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


@contextmanager
def transformers_generate(
    text: TextConfig, options: argparse.Namespace, *, compiled: bool
) -> Iterator[Generate]:
    """transformers' generate, its forward through torch.compile or not."""
    model = build(text, options.device, getattr(torch, options.dtype))
    config = model.config.get_text_config()
    print(
        f"transformers: attention {config._attn_implementation}, "
        f"experts {getattr(config, '_experts_implementation', None)}",
        flush=True,
    )
    if compiled:
        # Beyond the limit frames would run eagerly, and the row would not say so.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        model.forward = torch.compile(model.forward)  # type: ignore[method-assign]

    @torch.inference_mode()
    def generate(ids_BT: torch.Tensor, new_tokens: int) -> object:
        return model.generate(
            ids_BT, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip

    yield generate


@contextmanager
def engine_generate(options: argparse.Namespace) -> Iterator[Generate]:
    """This project's engine. Nothing is kept of a prompt, so that all are computed."""
    most = max(map(int, options.batches.split(",")))
    length = options.context + options.new_tokens
    args = EngineArgs(
        model_path=options.config,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        device=options.device,
        json_model_override_args=json.dumps({"num_hidden_layers": options.layers}),
        max_running_requests=most,
        max_total_tokens=2 * most * (length + 128),
        context_length=length,
        disable_radix_cache=True,
    )
    with Engine(args) as engine:

        def generate(ids_BT: torch.Tensor, new_tokens: int) -> object:
            params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
            return engine.generate(input_ids=ids_BT.tolist(), sampling_params=params)

        yield generate


def seconds(generate: Generate, ids_BT: torch.Tensor, new_tokens: int, repeats: int) -> float:
    """Median of one call."""
    times = []
    for _ in range(repeats):
        if ids_BT.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        generate(ids_BT, new_tokens)
        if ids_BT.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(out: Rows, name: str, generate: Generate, options: argparse.Namespace) -> None:
    """A row for each batch."""
    vocabulary = load_config(Path(options.config)).text.unpadded_vocab_size
    batches = [int(size) for size in options.batches.split(",")]
    for batch in tqdm(batches, desc=name, unit="batch"):
        ids_BT = torch.randint(vocabulary, (batch, options.context), device=options.device)
        began = time.perf_counter()
        generate(ids_BT, options.new_tokens)  # compilation
        warm_up = time.perf_counter() - began
        print(f"{name}, batch {batch}: warm after {warm_up:.1f} s", flush=True)
        first = seconds(generate, ids_BT, 1, options.repeats)
        whole = seconds(generate, ids_BT, options.new_tokens, options.repeats)
        step = (whole - first) / (options.new_tokens - 1)
        out.add(
            "small_stack", f"batch {batch}, context {options.context}", "speed only",
            implementation=name, layers=options.layers, dtype=options.dtype, batch=batch,
            step_ms=round(1e3 * step, 3), prefill_ms=round(1e3 * first, 2),
            tokens_per_s=round(batch / step, 1), warm_up_s=round(warm_up, 1),
        )  # fmt: skip


def each_alone(names: list[str], arguments: list[str]) -> int:
    """Run this program for each implementation, one after the other. Returns: the exit status."""
    status = 0
    for name in names:
        print(f"{name} begins", flush=True)
        command = [sys.executable, "-m", "bench.small_stack", *arguments]
        found = subprocess.run([*command, "--implementations", name], check=False).returncode
        print(f"{name} ended with status {found}", flush=True)
        status = status or found
    return status


def measure_one(name: str, options: argparse.Namespace) -> None:
    """All batches of one implementation."""
    text = load_config(Path(options.config), {"num_hidden_layers": options.layers}).text
    device = torch.device(options.device)
    out = Rows(
        options.out,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        arch=arch_of_device(device).name,
    )
    if name == "engine":
        made, label = engine_generate(options), "inkling-rocm engine"
    else:
        made = transformers_generate(text, options, compiled=name == "compiled")
        label = f"transformers {name}"
    with made as generate:
        measure(out, label, generate, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS))
    options = parser.parse_args()
    names = options.implementations.split(",")
    if unknown := set(names) - set(IMPLEMENTATIONS):
        parser.error(f"implementations {sorted(unknown)}: choose from {IMPLEMENTATIONS}")
    if len(names) > 1:
        return each_alone(names, sys.argv[1:])
    measure_one(names[0], options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
