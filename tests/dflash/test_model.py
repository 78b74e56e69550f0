"""The draft model against its definition in float64, over ragged contexts, pages and masks."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from inkling_rocm.checkpoint.dflash import (
    allocate_dflash,
    load_dflash_weights,
    random_dflash,
    write_random_dflash,
)
from inkling_rocm.config_dflash import DFlashConfig, load_dflash_config
from inkling_rocm.model.dflash import DFlashModel, DraftCache
from tests.dflash.oracle import FAULTS, block_hidden
from tests.engine.tiny import tiny_config

M = 5
CONTEXTS = (0, 1, 3, 4, 5, 11, 17)


def draft_config(*, windows=(0, 6), causal=(False, True)) -> DFlashConfig:
    base = random_dflash(tiny_config().text, block_size=M)
    return replace(
        base, head_dim=8, num_layers=len(windows), windows=windows, causal=causal, dtype="float32"
    )


VARIANTS = {
    "both kinds": draft_config(),
    "all sliding": draft_config(windows=(6, 6), causal=(True, True)),
    "all full": draft_config(windows=(0,), causal=(False,)),
    "causal everywhere": draft_config(windows=(0, 7), causal=(True, True)),
    "nowhere causal": draft_config(windows=(5, 0), causal=(False, False)),
    "window of one": draft_config(windows=(1,), causal=(True,)),
}


class Draft:
    """A random draft read back from a folder, and a NaN-poisoned cache of rows in odd pages."""

    def __init__(self, folder, config, *, page_size=4, dtype=torch.float32):
        folder = write_random_dflash(folder, config, seed=5, dtype=torch.float32)
        self.config = load_dflash_config(folder)
        assert self.config == config
        weights = allocate_dflash(config, dtype=dtype, device="cpu")
        load_dflash_weights(folder, config, weights, progress=False)
        self.model = DFlashModel(config, weights)
        self.tensors = load_file(folder / "model.safetensors")
        self.json = json.loads((folder / "config.json").read_text())
        self.dtype, self.page_size = dtype, page_size
        pages = -(-(max(CONTEXTS) + M) // page_size)
        order = torch.randperm(len(CONTEXTS) * pages, generator=torch.Generator().manual_seed(1))
        self.table = (order + 1).view(len(CONTEXTS), pages).int()
        shape = (config.num_layers, 2, order.numel() + 1, page_size, config.num_kv_heads)
        self.cache = DraftCache(
            storage=torch.full((*shape, config.head_dim), float("nan"), dtype=dtype)
        )

    def write(self, row, features, start, *, padding=0):
        """Context of one row from position `start` on, and tokens without a slot."""
        positions = start + torch.arange(len(features))
        page = self.table[row, positions // self.page_size].long()
        slots = page * self.page_size + positions % self.page_size
        if padding:
            features = torch.cat((features, torch.full((padding, features.shape[1]), 9.0)))
            positions = torch.cat((positions, torch.zeros(padding, dtype=torch.int64)))
            slots = torch.cat((slots, torch.zeros(padding, dtype=torch.int64)))
        self.model.write_context(features.to(self.dtype), positions, slots, self.cache)

    def hidden(self, rows, lengths, embeds):
        return self.model.forward(
            embeds.to(self.dtype), torch.tensor(lengths), self.table[list(rows)], self.cache
        )


def random_inputs(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = len(config.target_layer_ids) * config.hidden_size
    features = [torch.randn(n + M, width, generator=generator) for n in CONTEXTS]
    embeds = torch.randn(len(CONTEXTS), M, config.hidden_size, generator=generator)
    return features, embeds


def write_all(draft, features):
    """Every row's context in chunks, then what a later, rejected round has left behind it."""
    for row, (n, x) in enumerate(zip(CONTEXTS, features, strict=True)):
        start = 0
        for chunk in (1, 2, 5, 100):
            draft.write(row, x[start : min(start + chunk, n)], start, padding=row % 2)
            start = min(start + chunk, n)
        draft.write(row, 50 * x[n:], n)


def reference(draft, features, embeds, fault=None):
    return np.array(
        [
            block_hidden(draft.json, draft.tensors, x[:n].numpy(), e.numpy(), fault)
            for n, x, e in zip(CONTEXTS, features, embeds, strict=True)
        ]
    )


@torch.inference_mode()
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_over_ragged_contexts(tmp_path, variant, page_size):
    draft = Draft(tmp_path, VARIANTS[variant], page_size=page_size)
    features, embeds = random_inputs(draft.config)
    write_all(draft, features)
    got = draft.hidden(range(len(CONTEXTS)), CONTEXTS, embeds)
    want = reference(draft, features, embeds)
    assert np.abs(got.numpy() - want).max() < 2e-5 * np.abs(want).max()


@torch.inference_mode()
def test_bfloat16_errs_as_bfloat16_does(tmp_path):
    """Rounding each weight and input once costs about half of what the bf16 forward may."""
    config = VARIANTS["both kinds"]
    features, embeds = random_inputs(config)
    exact = Draft(tmp_path / "a", config)
    want = reference(exact, features, embeds)
    rounded = Draft(tmp_path / "b", config)
    for name, tensor in rounded.tensors.items():
        rounded.tensors[name] = torch.from_numpy(tensor).bfloat16().float().numpy()
    eager = reference(rounded, [x.bfloat16().float() for x in features], embeds.bfloat16().float())
    draft = Draft(tmp_path / "c", config, dtype=torch.bfloat16)
    write_all(draft, features)
    got = draft.hidden(range(len(CONTEXTS)), CONTEXTS, embeds).float().numpy()
    error, budget = (np.sqrt(np.square(x - want).mean()) for x in (got, eager))
    assert error < 3 * budget


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbours(tmp_path):
    draft = Draft(tmp_path, VARIANTS["both kinds"])
    features, embeds = random_inputs(draft.config)
    write_all(draft, features)
    together = draft.hidden(range(len(CONTEXTS)), CONTEXTS, embeds)
    for row, n in enumerate(CONTEXTS):
        alone = draft.hidden([row], [n], embeds[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_can_fail(tmp_path, fault):
    draft = Draft(tmp_path, VARIANTS["both kinds"])
    features, embeds = random_inputs(draft.config)
    write_all(draft, features)
    got = draft.hidden(range(len(CONTEXTS)), CONTEXTS, embeds)
    want = reference(draft, features, embeds, fault)
    assert np.abs(got.numpy() - want).max() > 1e-3 * np.abs(want).max()


@torch.inference_mode()
@pytest.mark.parametrize("first", [1, 4])
def test_rejections_leave_nothing(tmp_path, first):
    """Rounds that confirm 1..M positions each: every block equals one after a fresh prefill."""
    config = VARIANTS["both kinds"]
    fresh, draft = Draft(tmp_path / "a", config), Draft(tmp_path / "b", config)
    features, embeds = random_inputs(config)
    truth, n = features[-1], first
    draft.write(0, truth[:n], 0)
    for confirmed in (1, 3, M, 2, 1, 4):
        # A round's forward gives features at M positions; those after the confirmed are wrong.
        round_features = truth[n : n + M].clone()
        round_features[confirmed:] *= -3
        draft.write(0, round_features, n)
        n += confirmed
        fresh.write(1, truth[:n], 0)
        got = draft.hidden([0], [n], embeds[:1])
        want = fresh.hidden([1], [n], embeds[:1])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
