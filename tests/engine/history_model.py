"""A model whose logits are a hash of the token history that it finds in the host's state.

It writes token ids and positions where a real model writes keys, and inputs where it writes rings,
then reads them back through page tables and ring slots. Any mistake in the bookkeeping (a wrong
page, a freed one, a stale ring row, a missed chunk) raises or changes the hash, so the output
differs from `history_logits` of the true tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from inkling_rocm.config import AttentionConfig, InklingConfig, TextConfig
from inkling_rocm.engine import Engine, EngineArgs, NoMetrics, SamplingParams
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.engine.decode_runner import DecodeRunner
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.local_executor import LocalExecutor
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.memory import build_pools, plan_memory
from inkling_rocm.engine.prefill_runner import PrefillRunner
from inkling_rocm.engine.prefix_cache.checks import check_books
from inkling_rocm.engine.sampler import SampleRow, sample
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.sequence import Request, Sequence
from inkling_rocm.engine.token_sampler import TorchSampler

PRIME = 16777213  # hashes stay exact in float32
SHARPNESS = 2.0  # of its logits
WINDOW = 6
TAPS = 4
VOCAB = 300  # 256 bytes, then special tokens
EOS, BLOCK_END, ANSWER = 256, 257, 258
LAYERS = {"window": 0, "global": 1}
# Batch buckets of executors that run ahead, set by tests that run in both modes; None = steps are
# laid out afresh and booked at once, as the engine does it on a CPU.
BUCKETS: tuple[int, ...] | None = None
PROMPT_BUCKETS = (5, 16, 40)


class ByteTokenizer:
    """One token a byte; 256 and up are special."""

    vocab_size = VOCAB
    eos_ids = (EOS,)
    block_end_ids = (BLOCK_END,)

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b"<%d>" % token

    def is_special(self, token):
        return token >= 256


def history_config() -> InklingConfig:
    def attention(window):
        return AttentionConfig(
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            d_rel=1,
            extent=8,
            window=window,
            log_floor=None,
            log_alpha=0.1,
        )

    text = TextConfig(
        hidden_size=2,
        num_layers=2,
        vocab_size=VOCAB,
        unpadded_vocab_size=VOCAB,
        context_length=256,
        rms_norm_eps=1e-6,
        conv_taps=TAPS,
        dense_intermediate_size=2,
        mup_multiplier=1.0,
        local_attention=attention(WINDOW),
        global_attention=attention(0),
        layer_is_local=(True, False),
        layer_is_moe=(False, False),
        moe=None,
    )
    return InklingConfig(
        text=text, mtp=None, audio=None, vision=None, dtype="float32", eos_token_ids=(EOS,)
    )


def history_hash(tokens) -> int:
    value = 0
    for token in tokens:
        value = (value * 257 + int(token) + 1) % PRIME
    return value


def _logits_of(hash_all: int, hash_window: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=hash_all * PRIME + hash_window))
    return (generator.standard_normal(VOCAB) * SHARPNESS).astype(np.float32)


def history_logits(tokens) -> torch.Tensor:
    """What the model must say after these tokens, [VOCAB]."""
    window = list(tokens)[-WINDOW:]
    return torch.from_numpy(_logits_of(history_hash(tokens), history_hash(window)))


class HistoryModel:
    """Stands where InklingModel stands. `before` is called with every batch's meta: tests make it
    raise or count."""

    def __init__(self, before=None):
        self.before = before

    def forward(self, input_ids, host):
        meta = host.meta
        if self.before is not None:
            self.before(meta)
        positions = meta.positions.long()
        for layer in LAYERS.values():
            kv = host.kv(layer)
            real = kv.slot > 0
            entry = torch.stack((input_ids + 1, positions), -1).float()[real]
            kv.k.view(-1, 2)[kv.slot[real]] = entry
            kv.v.view(-1, 2)[kv.slot[real]] = -entry
        hidden = torch.zeros(meta.num_tokens, 2)
        cu = meta.cu_seqlens_q.tolist()
        for row in range(meta.num_rows):
            if int(host.conv(0, "k").slot[row]) and cu[row] < cu[row + 1]:
                tokens = self._row_tokens(host, row)
                self._use_rings(host, row, tokens)
                hidden[cu[row] : cu[row + 1]] = self._hashes(host, row, tokens)
        return hidden

    def logits(self, hidden, host):
        rows = [_logits_of(int(a), int(w)) for a, w in hidden.tolist()]
        return torch.from_numpy(np.stack(rows))

    @staticmethod
    def _read(host, row, layer, first):
        """Token ids of positions first .. kv_len-1, read through the page table."""
        kv = host.kv(layer)
        positions = torch.arange(first, int(host.meta.kv_len[row]))
        page = kv.page_table[row].long()[positions // kv.page_size - int(kv.first_page[row])]
        assert (page > 0).all(), f"row {row}: a visible page is the sink"
        at = page * kv.page_size + positions % kv.page_size
        k, v = kv.k.view(-1, 2)[at], kv.v.view(-1, 2)[at]
        assert (k[:, 1] == positions).all(), f"row {row}: found positions {k[:, 1]}"
        assert (v == -k).all()
        return (k[:, 0].long() - 1).tolist()

    def _row_tokens(self, host, row):
        return self._read(host, row, LAYERS["global"], 0)

    def _hashes(self, host, row, tokens):
        start = int(host.meta.q_start[row])
        floor = max(start - (WINDOW - 1), 0)
        recent = self._read(host, row, LAYERS["window"], floor)
        assert recent == tokens[floor:], f"row {row}: window layer holds {recent}"
        value, result = history_hash(tokens[:start]), []
        for end in range(start + 1, len(tokens) + 1):
            value = (value * 257 + tokens[end - 1] + 1) % PRIME
            window = recent[max(end - WINDOW, 0) - floor : end - floor]
            result.append((value, history_hash(window)))
        return torch.tensor(result).float()

    @staticmethod
    def _use_rings(host, row, tokens):
        start = int(host.meta.q_start[row])
        for layer in LAYERS.values():
            for stream in ("k", "v", "attn", "mlp"):
                ring = host.conv(layer, stream)
                state = ring.state[int(ring.slot[row])]
                history = int(ring.history[row])
                assert history == min(start, TAPS - 1)
                for p in range(start - history, start):
                    found = state[p % len(state), 0]
                    assert found == tokens[p], f"row {row}: ring of {layer}/{stream} at {p}"
                for p in range(max(start, len(tokens) - len(state)), len(tokens)):
                    state[p % len(state)] = tokens[p]
                if ring.snapshot_slot is not None and int(ring.snapshot_slot[row]):
                    kept = ring.state[int(ring.snapshot_slot[row])]
                    boundary = int(ring.snapshot_position[row])
                    assert start < boundary <= len(tokens)
                    kept[:] = float("nan")
                    for p in range(max(boundary - (TAPS - 1), 0), boundary):
                        kept[p % len(kept)] = tokens[p]


class ScriptedModel(HistoryModel):
    """After a prompt of one token, writes the tokens of a script."""

    def __init__(self, script):
        super().__init__()
        self.script = script

    def _hashes(self, host, row, tokens):
        positions = torch.arange(int(host.meta.q_start[row]), len(tokens))
        return torch.stack((positions, positions), -1).float()

    def logits(self, hidden, host):
        logits = torch.zeros(len(hidden), VOCAB)
        wanted = [self.script[int(p) % len(self.script)] for p in hidden[:, 0].tolist()]
        logits[torch.arange(len(hidden)), wanted] = 100.0
        return logits


def reference_tokens(prompt, params: SamplingParams, seed=None):
    """The output of one continuation, computed without an engine, ignoring text."""
    tokens = list(prompt)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    edits = LogitEdits(params, prompt, sorted(stops))
    while len(tokens) - len(prompt) < params.max_new_tokens:
        row = SampleRow(params, params.seed if seed is None else seed, len(tokens), edits)
        (token,) = sample(history_logits(tokens)[None], [row], keep_logits=False)
        tokens.append(token)
        edits.add(token)
        if token in stops:
            break
    return tokens[len(prompt) :]


def make_executor(model, host, plan) -> LocalExecutor:
    """Plain, or running ahead over padded buckets: what a GPU does, without graphs."""
    settings = {"vocabulary": VOCAB}
    if BUCKETS is not None:
        draws = TorchSampler().for_rounds(rejection=False)
        decode = DecodeRunner(model, host, draws, buckets=BUCKETS, max_kv=plan.context_length)
        prefill = PrefillRunner(
            model,
            host,
            tokens=PROMPT_BUCKETS,
            max_rows=plan.max_running,
            max_kv=plan.context_length,
            short_row=1,
        )
        settings |= {"runs_ahead": True, "decode": decode, "prefill": prefill}
    return LocalExecutor(model, host, TorchSampler(), **settings)


def history_engine(*, model=None, tokenizer=None, metrics=None, **args):
    """An engine over a HistoryModel, invariants checked on every step, unwritten pages NaN."""
    parts = EngineParts(
        config=history_config(),
        model=model or HistoryModel(),
        tokenizer=tokenizer,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    settings = {"page_size": 16, "max_running_requests": 8, **args}
    engine = Engine(
        EngineArgs(model_path="history", check_invariants=True, **settings),
        parts=parts,
        metrics=metrics,
    )
    _poison(engine._core)
    return engine


def history_core(*, model=None, window_pages=None, **args) -> EngineCore:
    """The same without a thread: tests call `step`. window_pages: instead of what is planned."""
    text = history_config().text
    settings = {"page_size": 16, "max_running_requests": 8, **args}
    engine_args = EngineArgs(model_path="history", **settings)
    cpu = torch.device("cpu")
    plan = plan_memory(text, engine_args, dtype=torch.float32, device=cpu)
    if window_pages is not None:
        plan = replace(plan, window_pages=window_pages)
    pools, rings = build_pools(text, plan, dtype=torch.float32, device=cpu)
    host = EmbeddedHost(
        text,
        pools,
        rings,
        max_tokens=plan.chunk_tokens + plan.max_running,
        max_rows=plan.max_running,
        device=cpu,
        check=True,
    )
    scheduler = Scheduler(
        pools, rings, chunk_tokens=plan.chunk_tokens, max_running=plan.max_running
    )
    core = EngineCore(make_executor(model or HistoryModel(), host, plan), scheduler, NoMetrics())
    _poison(core)
    return core


def _poison(core: EngineCore) -> None:
    """What was not written must not be read."""
    for pool in core.scheduler.pools:
        pool.storage[:, :, 1:] = float("nan")
    for storage in core.scheduler.rings.storage:
        storage[:] = float("nan")


class ListHandle:
    """Collects updates where RequestHandle queues them."""

    def __init__(self):
        self.updates = []

    def push(self, updates):
        self.updates += updates

    def tokens(self, index=0):
        return [t for u in self.updates if u.index == index for t in u.token_ids]

    def reasons(self):
        return {u.index: u.finish_reason for u in self.updates if u.finish_reason}


def add_request(core: EngineCore, order: int, prompt, params: SamplingParams, **fields) -> Request:
    """Give a core a request, as Engine.submit does."""
    request = Request(
        rid=f"r{order}",
        order=order,
        prompt_ids=list(prompt),
        params=params,
        seed=params.seed or 0,
        handle=ListHandle(),
        stop_ids=frozenset({EOS, *params.stop_token_ids} - ({EOS} if params.ignore_eos else set())),
        **fields,
    )
    request.sequences = [Sequence(request, i, None) for i in range(params.n)]
    core.add(request)
    return request


def run_to_end(core: EngineCore, most_steps=2000) -> int:
    """Step until idle. Returns: steps."""
    for step in range(most_steps):
        if core.idle:
            return step
        core.step()
    raise AssertionError(f"not idle after {most_steps} steps")


def assert_empty(core: EngineCore) -> None:
    """Pools, slots and queues are as at the start, once the prefix cache is emptied."""
    scheduler = core.scheduler
    assert not scheduler.cache.captures
    check_books(scheduler.cache, scheduler.running)
    scheduler.cache.clear()
    assert sorted(scheduler.cache.free_snapshots) == list(scheduler.rings.snapshot_slots)
    assert not core.requests
    assert scheduler.idle
    assert scheduler.rings.used == 0
    for pool in scheduler.pools:
        assert pool.used == 0
        assert not any(pool.references)
        assert not any(pool.held)
        assert pool.unused == pool.total
        assert not pool.table.any()
        assert not pool.first.any()
        assert not pool.end.any()
