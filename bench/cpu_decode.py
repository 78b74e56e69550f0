"""Decode throughput on a CPU against transformers' generate, batch 16, in one process.

    python -m bench.cpu_decode                 prints a table and appends rows to bench/results
    python -m bench.cpu_decode --no-rows       prints only

Both run the same checkpoint, prompts and dtype on the same threads; the greedy tokens must agree
first. Prefill is subtracted by timing a run that stops after one token. Rounds alternate, so that
both see the same machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench.rows import append, result_row

BATCH, PROMPT, NEW_TOKENS, ROUNDS = 16, 64, 64, 5
# Small enough that the work between the matrix products matters, as on a laptop that tries things
# out.
TINY = {
    "vocab_size": 4096,
    "unpadded_vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "sliding_window_size": 64,
    "d_rel": 16,
    "rel_extent": 128,
    "log_scaling_n_floor": 128000,
    "layer_types": ["hybrid_sliding"] * 5 + ["hybrid"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "intermediate_size": 384,
    "moe_intermediate_size": 32,
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
}


def tiny_checkpoint(folder: Path) -> Path:
    """A random tiny checkpoint with a 4k vocabulary, written by transformers."""
    from transformers import InklingConfig, InklingForConditionalGeneration

    torch.manual_seed(0)
    config = InklingConfig(
        text_config={"model_type": "inkling_text", **TINY},
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 4},
        vision_config={"patch_size": 4, "num_hidden_layers": 2},
    )
    model = InklingForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


class Peer:
    """transformers' generate, fp32, at its defaults."""

    name = "transformers"

    def __init__(self, path: Path):
        from transformers import InklingForConditionalGeneration

        self.model = InklingForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self.model.eval()

    def __call__(self, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
        out = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[:, prompts.shape[1] :].tolist()


class Ours:
    """The embedded engine, fp32."""

    name = "inkling-rocm"

    def __init__(self, path: Path):
        from inkling_rocm.engine import Engine

        self.engine = Engine(
            model_path=str(path),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            max_running_requests=BATCH,
            chunked_prefill_size=BATCH * PROMPT,
        )

    def __call__(self, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
        params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        results = self.engine.generate(input_ids=prompts.tolist(), sampling_params=params)
        return [result["output_ids"] for result in results]


def decode_seconds(run, prompts: torch.Tensor) -> float:
    """Seconds of NEW_TOKENS - 1 decode steps of the whole batch."""
    start = time.perf_counter()
    run(prompts, 1)
    first = time.perf_counter()
    run(prompts, NEW_TOKENS)
    return (time.perf_counter() - first) - (first - start)


def compare(case: str, path: Path, vocab: int) -> dict:
    """Check that both produce the same tokens, then measure them in turns."""
    torch.manual_seed(1)
    prompts = torch.randint(1, vocab, (BATCH, PROMPT))
    peer, ours = Peer(path), Ours(path)
    try:
        wanted, got = peer(prompts, NEW_TOKENS), ours(prompts, NEW_TOKENS)
        same = sum(a == b for a, b in zip(wanted, got, strict=True))
        seconds: dict[str, list[float]] = {peer.name: [], ours.name: []}
        for _ in range(ROUNDS):
            for run in (peer, ours):
                seconds[run.name].append(decode_seconds(run, prompts))
    finally:
        ours.engine.shutdown()
    steps = BATCH * (NEW_TOKENS - 1)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return result_row(
        "engine_decode",
        case,
        device=f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        arch="cpu",
        tokens_per_s=round(steps / median[ours.name], 1),
        peer="transformers generate",
        peer_tokens_per_s=round(steps / median[peer.name], 1),
        ratio=round(median[peer.name] / median[ours.name], 2),
        batch=BATCH,
        dtype="float32",
        rounds=ROUNDS,
        gate=f"{same}/{BATCH} greedy outputs equal",
        evidence="measured",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-rows", action="store_true", help="do not append to bench/results")
    arguments = parser.parse_args()
    from inkling_rocm.checkpoint import resolve_model_path

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rows.append(compare("tiny, 4k vocabulary", tiny_checkpoint(Path(folder)), 4096))
    rows.append(compare("demo, 200k vocabulary", resolve_model_path("demo"), 200000))
    for row in rows:
        print(
            f"{row['case']:<24} ours {row['tokens_per_s']:>8} tok/s   transformers "
            f"{row['peer_tokens_per_s']:>8} tok/s   ratio {row['ratio']}   {row['gate']}"
        )
    if not arguments.no_rows:
        print(f"rows appended to {append('cpu_decode', rows)}")


if __name__ == "__main__":
    main()
