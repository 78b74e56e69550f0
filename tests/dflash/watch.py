"""A model small enough to guess, a block draft for it, and what watches the two in an engine."""

from dataclasses import replace
from functools import lru_cache

import torch

from inkling_rocm.checkpoint.dflash import allocate_dflash, fill_dflash_dummy, random_dflash
from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.speculative.dflash import DFlashDrafter
from inkling_rocm.model import InklingModel
from inkling_rocm.model.dflash import DFlashModel, DraftCache
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named
from tests.engine.tiny import tiny_config
from tests.support.plain_host import PlainHost, Row

VOCAB = 6  # so small that a draft which knows nothing is right now and then


def target():
    config = tiny_config()
    return replace(config, text=replace(config.text, vocab_size=8, unpadded_vocab_size=VOCAB))


CONFIG = target()
DRAFT = replace(random_dflash(CONFIG.text, block_size=6), windows=(0, 9))


@lru_cache(maxsize=1)
def tiny_parts() -> EngineParts:
    weights = allocate(CONFIG, dtype=torch.float32, device="cpu")
    fill_dummy(CONFIG, weights, seed=3)
    draft = allocate_dflash(DRAFT, dtype=torch.float32, device="cpu")
    fill_dflash_dummy(DRAFT, draft, seed=2)
    return EngineParts(
        config=CONFIG,
        model=InklingModel(
            CONFIG, weights, resolve_ops(CONFIG, arch_named("cpu"), dtype="float32")
        ),
        tokenizer=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_draft=DFlashModel(DRAFT, draft),
    )


def make_engine(*, speculate=True, **args) -> Engine:
    parts = tiny_parts()
    settings = {"page_size": 16, "max_running_requests": 8, "check_invariants": True, **args}
    if speculate:
        settings |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "demo"}
    else:
        parts = replace(parts, block_draft=None)
    return Engine(EngineArgs(model_path="tiny", skip_tokenizer_init=True, **settings), parts=parts)


def run(engine, requests):
    """Tokens of every continuation of (prompt, params) requests that run together."""
    with engine:
        for pool in engine._core.scheduler.pools:
            for storage in (pool.storage, *pool.beside):
                storage[:, :, 1:] = float("nan")
        handles = [engine.submit(prompt, params) for prompt, params in requests]
        found = []
        for handle, (_, params) in zip(handles, requests, strict=True):
            tokens = [[] for _ in range(params.n)]
            for update in handle:
                assert not update.error, update.error
                tokens[update.index] += update.token_ids
            found.append(tokens)
        assert all(pool.used == 0 for pool in engine._core.scheduler.pools)
        return found


class Watch:
    """Counts accepted and rejected drafts, and makes some of a draft that knows nothing right.

    Args: truth: outputs by prompt: 0, 1, ... all of a block's drafts are taken from them, in turn;
        those of other prompts stay as they are. compare: compare every third block's logits with
        those of a fresh run.
    """

    def __init__(self, monkeypatch, engine, truth, *, compare=False):
        self.accepted = self.rejected = self.seen = self.compared = 0
        self.worst = 0.0
        core = engine._core
        propose, blocks = DFlashDrafter.propose, DFlashDrafter._draft_blocks

        def counted(drafter, confirmed):
            for row, verified in enumerate(confirmed.step.draft.verify):
                accepted = max(len(confirmed.tokens[row]) - 1, 0)
                self.accepted += accepted
                self.rejected += int(verified) - accepted
            propose(drafter, confirmed)

        def compared(drafter, confirmed, slots_n, steps):
            blocks(drafter, confirmed, slots_n, steps)
            sequences = {s.slot: s for s in core.scheduler.running}
            for row in confirmed.drafting:
                slot = int(confirmed.step.slots[row])
                sequence = sequences[slot]
                tokens = [*sequence.tokens, *confirmed.tokens[row]]
                if compare and self.seen % 3 == 0:
                    self.compare(drafter.logits[slot, :steps], tokens)
                made = len(tokens) - sequence.prompt_len
                right = truth.get(tuple(tokens[: sequence.prompt_len]), [])[made:]
                right = right[: self.seen % (steps + 1)]
                drafter.tokens[slot, : len(right)] = torch.tensor(right, dtype=torch.int64)
                self.seen += 1

        monkeypatch.setattr(DFlashDrafter, "propose", counted)
        monkeypatch.setattr(DFlashDrafter, "_draft_blocks", compared)

    def compare(self, logits_NV, tokens):
        error = (logits_NV - fresh_logits(tokens, len(logits_NV))).abs().max()
        self.worst = max(self.worst, float(error.nan_to_num(torch.inf)))
        self.compared += 1


def fresh_logits(tokens, steps):
    """Draft logits [steps, V] after these tokens: one forward of the model, one of the draft."""
    parts = tiny_parts()
    *past, last = tokens
    n, H = len(past), CONFIG.text.hidden_size
    host = PlainHost(CONFIG, num_requests=1, max_len=n, page_size=n)
    host.prepare([Row(1, 0, n)])
    taps = {layer: torch.empty(n, H) for layer in DRAFT.target_layer_ids}
    parts.model.forward(torch.tensor(past), host, taps)
    draft = parts.block_draft
    shape = (DRAFT.num_layers, 2, 2, n, DRAFT.num_kv_heads, DRAFT.head_dim)
    cache = DraftCache(storage=torch.full(shape, float("nan")))
    positions = torch.arange(n)
    draft.write_context(torch.cat(list(taps.values()), 1), positions, n + positions, cache)
    ids = torch.tensor([[last] + [DRAFT.mask_token_id] * steps])
    embeds = parts.model.weights["embed"][ids]
    hidden = draft.forward(embeds, torch.tensor([n]), torch.ones(1, 1, dtype=torch.int32), cache)
    return parts.model.logits(hidden[0, 1:], host)
