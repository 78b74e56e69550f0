"""Checkpoints written by transformers, loaded by us, one of each configuration a session."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from inkling_rocm.checkpoint.loader import load_weights
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.config import InklingConfig, load_config
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import ARCHS
from tests.parity.oracle import generated_config, oracle_model

PROMPT, GREEDY = 45, 12


def build(config: InklingConfig, weights, dtype=torch.float32) -> InklingModel:
    """The model on the torch reference ops."""
    name = str(dtype).removeprefix("torch.")
    ops = resolve_ops(config, ARCHS["cpu"], dtype=name, attention_backend="torch")
    return InklingModel(config, weights, ops)


@dataclass
class Pair:
    """One configuration, run by transformers and loaded by us."""

    config: InklingConfig
    weights: dict[str, torch.Tensor]
    prompt: list[int]
    logits: torch.Tensor  # transformers' fp32 logits of the prompt
    tokens: list[int]  # transformers' greedy continuation
    path: str


@pytest.fixture(scope="session")
def oracle_pair(tmp_path_factory):
    pairs: dict[int, Pair] = {}

    def make(seed: int) -> Pair:
        if seed not in pairs:
            path = tmp_path_factory.mktemp(f"tiny{seed}")
            pairs[seed] = _make(seed, path)
        return pairs[seed]

    return make


@torch.no_grad()
def _make(seed: int, path) -> Pair:
    arguments = generated_config(seed)
    oracle = oracle_model(arguments, seed)
    oracle.save_pretrained(path)
    prompt = torch.randint(0, arguments["unpadded_vocab_size"], (1, PROMPT))
    logits = oracle(prompt).logits[0]
    # Uncached: with a window of 1 transformers 5.23's cached decode disagrees with its own forward.
    # The mask is given, because generate() would take every token equal to the pad id for padding.
    generated = oracle.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=GREEDY,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=False,
    )
    config = load_config(path)
    weights = allocate(config, dtype=torch.float32, device="cpu")
    load_weights(path, config, weights, progress=False)
    return Pair(
        config, weights, prompt[0].tolist(), logits, generated[0, PROMPT:].tolist(), str(path)
    )
