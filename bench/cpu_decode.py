"""Decode throughput on a CPU against transformers' generate, batch 16.

    python -m bench.cpu_decode                 prints a table and appends rows to bench/results
    python -m bench.cpu_decode --no-rows       prints only

Both run the same checkpoint, dtype and prompts of different lengths; the greedy tokens must agree
first. Prefill is subtracted by timing a run that stops after one token. Each runs in a process of
its own, in turns: in one process their two OpenMP teams would slow each other down.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.rows import ROOT, append, result_row

BATCH, PROMPT, NEW_TOKENS = 16, 64, 64
TURNS, RUNS = 3, 3
# Inkling's layer pattern four times, its window and extents, small everywhere else.
TINY = {
    "vocab_size": 4096,
    "unpadded_vocab_size": 4096,
    "hidden_size": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_n_floor": 128000,
    "layer_types": (["hybrid_sliding"] * 5 + ["hybrid"]) * 4,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 22,
    "intermediate_size": 128,
    "moe_intermediate_size": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "max_position_embeddings": 4096,
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

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        out = self.model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[:, longest:].tolist()


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

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        results = self.engine.generate(input_ids=prompts, sampling_params=params)
        return [result["output_ids"] for result in results]


CONTENDERS = {contender.name: contender for contender in (Peer, Ours)}


def decode_seconds(run, prompts: list[list[int]]) -> float:
    """Seconds of NEW_TOKENS - 1 decode steps of the whole batch."""
    start = time.perf_counter()
    run(prompts, 1)
    first = time.perf_counter()
    run(prompts, NEW_TOKENS)
    return (time.perf_counter() - first) - (first - start)


def work(name: str, path: Path, prompts: list[list[int]]) -> dict:
    """What one process measures: the greedy tokens, then the seconds of RUNS decodes."""
    run = CONTENDERS[name](path)
    tokens = run(prompts, NEW_TOKENS)
    seconds = [decode_seconds(run, prompts) for _ in range(RUNS)]
    return {"tokens": tokens, "seconds": seconds, "threads": torch.get_num_threads()}


def in_process(name: str, path: Path, prompts: list[list[int]]) -> dict:
    """`work` in a fresh Python process."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.cpu_decode", "--worker", name, str(path)],
        input=json.dumps(prompts),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: str, path: Path, vocab: int) -> dict:
    """Check that both produce the same tokens, then measure them in turns."""
    generator = random.Random(1)
    lengths = [generator.randint(PROMPT // 2, PROMPT) for _ in range(BATCH)]
    prompts = [[generator.randrange(1, vocab) for _ in range(length)] for length in lengths]
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    results: dict[str, dict] = {}
    for turn in range(TURNS):
        for name in CONTENDERS:
            print(f"{case}: turn {turn + 1} of {TURNS}, {name}", file=sys.stderr)
            results[name] = in_process(name, path, prompts)
            seconds[name] += results[name]["seconds"]
    pairs = zip(results[Peer.name]["tokens"], results[Ours.name]["tokens"], strict=True)
    same = sum(peer == ours for peer, ours in pairs)
    steps = BATCH * (NEW_TOKENS - 1)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return result_row(
        "engine_decode",
        case,
        device=f"{platform.machine()} CPU, {results[Ours.name]['threads']} threads",
        arch="cpu",
        tokens_per_s=round(steps / median[Ours.name], 1),
        peer="transformers generate",
        peer_tokens_per_s=round(steps / median[Peer.name], 1),
        ratio=round(median[Peer.name] / median[Ours.name], 2),
        batch=BATCH,
        prompt_tokens=[min(lengths), max(lengths)],
        new_tokens=NEW_TOKENS,
        dtype="float32",
        runs=TURNS * RUNS,
        gate=f"{same}/{BATCH} greedy outputs equal",
        evidence="measured",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-rows", action="store_true", help="do not append to bench/results")
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, path = arguments.worker
        print(json.dumps(work(name, Path(path), json.load(sys.stdin))))
        return
    from inkling_rocm.checkpoint import resolve_model_path

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rows.append(compare("tiny, 24 layers, 4k vocabulary", tiny_checkpoint(Path(folder)), 4096))
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
