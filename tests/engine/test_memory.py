"""Memory planning: what is promised fits, what cannot be had is refused with the numbers."""

import gc
import logging

import pytest
import torch

from inkling_rocm.config import load_config
from inkling_rocm.engine import Engine, build_core, free_memory, load, memory
from inkling_rocm.engine import other_memory as other_memory_module
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.free_memory import GIB, free_bytes
from inkling_rocm.engine.gpu import largest_prompts
from inkling_rocm.engine.memory import build_pools, plan_memory
from inkling_rocm.engine.other_memory import other_memory
from inkling_rocm.model.layer import rank_text
from inkling_rocm.model.mtp import text_with_drafts
from tests.engine.tiny import VOCAB, tiny_config, tiny_engine, tiny_mtp_config

CPU = torch.device("cpu")


def plan_of(config, *, free=4 * GIB, device=CPU, dtype=torch.float32, monkeypatch=None, **args):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    return plan_memory(config.text, EngineArgs(model_path="x", **args), dtype=dtype, device=device)


def held_bytes(text, plan, dtype):
    """Bytes of the planned pools and rings, counted from the shapes that would be allocated."""
    pools, rings = build_pools(text, plan, dtype=dtype, device=torch.device("meta"))
    tensors = [pool.storage for pool in pools] + rings.storage
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("free_gib", [60, 100, 200])
def test_the_released_model_stays_within_its_share(
    small_config_path, monkeypatch, page_size, free_gib
):
    config = load_config(small_config_path)
    plan = plan_of(
        config,
        free=free_gib * GIB,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        page_size=page_size,
        max_running_requests=64,
        monkeypatch=monkeypatch,
    )
    held = held_bytes(config.text, plan, torch.bfloat16)
    assert held <= 0.85 * free_gib * GIB
    assert held >= 0.5 * 0.85 * free_gib * GIB
    assert plan.context_length >= 16384
    assert plan.context_length <= (plan.global_pages - 1) * page_size


@pytest.mark.parametrize("depths", [1, 3, 8])
@pytest.mark.parametrize("ahead", [True, False])
def test_the_rings_of_drafts_stay_within_the_share(small_config_path, depths, ahead):
    """They are rows of every ring, by the thousand of sequences more than the pages are."""
    config, dtype, free = load_config(small_config_path), torch.bfloat16, 100 * GIB
    text = text_with_drafts(config, depths)
    args = EngineArgs(
        model_path="x", max_running_requests=1000, context_length=4096,
        mem_fraction_static=0.5, disable_overlap_schedule=not ahead,
    )  # fmt: skip
    plan = plan_memory(text, args, dtype=dtype, device=CPU, free=free, draft_depths=depths)
    hidden = 2 * depths * text.hidden_size * dtype.itemsize * (plan.slots + plan.snapshots)
    assert 0.45 * free < held_bytes(text, plan, dtype) + hidden <= 0.5 * free


def test_window_pages_suffice_for_every_sequence_at_once(monkeypatch):
    """Then preemption is only ever about global pages."""
    text = tiny_config().text
    for page_size in (1, 16, 64):
        plan = plan_of(
            tiny_config(), page_size=page_size, max_running_requests=5, monkeypatch=monkeypatch
        )
        (_, window), _ = build_pools(text, plan, dtype=torch.float32, device=CPU)
        needed = 5 * window.pages_for(plan.context_length, 1) + plan.chunk_tokens // page_size
        assert window.total >= needed


def test_explicit_sizes_are_obeyed(monkeypatch):
    plan = plan_of(
        tiny_config(),
        page_size=16,
        max_total_tokens=100,
        chunked_prefill_size=7,
        max_running_requests=3,
        monkeypatch=monkeypatch,
    )
    assert (plan.global_pages, plan.chunk_tokens, plan.slots) == (8, 7, 4)
    assert plan.context_length == 112


@pytest.mark.parametrize(
    ("context", "running", "chunk"), [(100, 32, 512), (100, 3, 300), (500, 4, 512)]
)
def test_a_prompt_step_holds_several_short_prompts(monkeypatch, context, running, chunk):
    """A chunk cut at the context length would give each short prompt a forward of its own."""
    plan = plan_of(
        tiny_config(),
        page_size=16,
        context_length=context,
        max_running_requests=running,
        monkeypatch=monkeypatch,
    )
    assert plan.chunk_tokens == chunk
    pools, _ = build_pools(tiny_config().text, plan, dtype=torch.float32, device=CPU)
    row, most = largest_prompts(plan, pools)
    assert row == context // 16 * 16
    assert most == min(chunk, running * row)


def test_no_warm_up_wants_more_pages_than_there_are(monkeypatch):
    settings = {"page_size": 16, "max_total_tokens": 100, "max_running_requests": 9}
    for context in (None, 33, 10):
        plan = plan_of(tiny_config(), context_length=context, monkeypatch=monkeypatch, **settings)
        pools, _ = build_pools(tiny_config().text, plan, dtype=torch.float32, device=CPU)
        row, most = largest_prompts(plan, pools)
        lengths = [min(row, most - at) for at in range(0, most, row)]
        assert len(lengths) <= plan.max_running
        for pool in pools:
            for slot, length in enumerate(lengths, 1):
                assert pool.missing(slot, length) <= pool.free
                pool.extend(slot, length)


def test_a_cpu_takes_a_bounded_share_by_default(monkeypatch):
    config = tiny_config()
    plan = plan_of(config, free=10_000 * GIB, monkeypatch=monkeypatch)
    assert held_bytes(config.text, plan, torch.float32) < 4 * GIB
    assert plan.context_length == config.text.context_length


def test_too_little_memory_is_refused_with_the_numbers(monkeypatch):
    with pytest.raises(ValueError, match="GiB for pages and rings do not hold one sequence"):
        plan_of(tiny_config(), free=1000, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("layers", "too_much"),
    [
        ((True, False), {"max_total_tokens": 10**9}),
        ((False, False), {"max_total_tokens": 10**9}),
        ((True, False), {"max_running_requests": 10**7}),
        ((True, True), {"max_running_requests": 10**7}),
        ((False, False), {"max_running_requests": 10**7}),
    ],
)
def test_explicit_sizes_beyond_the_memory_are_refused(monkeypatch, layers, too_much):
    config = tiny_config(layer_is_local=layers)
    with pytest.raises(ValueError, match=r"GiB .*lower") as caught:
        plan_of(config, free=GIB, monkeypatch=monkeypatch, **{"max_total_tokens": 512} | too_much)
    assert "-" not in str(caught.value)  # no negative number of pages


def test_weights_beyond_the_memory_are_refused_before_they_are_allocated(
    small_config_path, tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text(small_config_path.read_text())
    monkeypatch.setattr(load, "allocate", pytest.fail)
    monkeypatch.setattr(load, "free_bytes", lambda device: 20 * GIB)
    with pytest.raises(ValueError, match=r"weights need 49\d\.\d GiB in bfloat16, but 20\.0 GiB"):
        load.load_parts(EngineArgs(model_path=str(tmp_path), device="cpu", dtype="bfloat16"))


def test_a_control_groups_cached_files_are_free(tmp_path):
    """After a checkpoint was read a container's memory is full of it; the kernel gives it back."""
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("3900\n")
    (tmp_path / "memory.stat").write_text("anon 700\nactive_file 200\ninactive_file 3000\n")
    assert free_memory._group_free(tmp_path) == 3300
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory._group_free(tmp_path) is None
    assert free_memory._group_free(tmp_path / "none") is None


def test_a_platform_without_proc_still_tells(tmp_path):
    assert free_memory._machine_free(tmp_path / "meminfo") >= free_bytes(CPU)


def test_the_plan_is_logged(monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        plan_of(tiny_config(), page_size=16, max_total_tokens=96, monkeypatch=monkeypatch)
    assert "7 global" in caplog.text
    assert "context 96 (checkpoint: 512)" in caplog.text


@pytest.mark.parametrize(
    ("context", "pool", "most"),
    [({"context_length": 48, "max_running_requests": 2}, 4096, 96), ({}, 128, 128)],
)
def test_a_prompt_chunk_that_nothing_fills_is_told(monkeypatch, caplog, context, pool, most):
    plan = plan_of(
        tiny_config(),
        monkeypatch=monkeypatch,
        chunked_prefill_size=8192,
        max_total_tokens=pool,
        **context,
    )
    assert plan.chunk_tokens == most
    assert f"at most {most} prompt tokens" in caplog.text
    caplog.clear()
    plan_of(tiny_config(), monkeypatch=monkeypatch, max_total_tokens=pool, **context)
    assert "chunked_prefill_size" not in caplog.text  # nobody asked for the default


def test_free_memory_of_this_machine_is_plausible():
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


def test_what_is_kept_beside_the_pools_is_counted_exactly():
    """Token counts of the sampler and the logits of drafts, as they are allocated."""
    pytest.importorskip("triton")
    from inkling_rocm.engine.device_sampler import DeviceSampler

    settings = {"speculative_num_steps": 2, "speculative_use_rejection_sampling": True}
    with tiny_engine(tiny_mtp_config(), max_running_requests=3, **settings) as engine:
        logits = engine._core.executor.speculation.drafter.logits
    args = EngineArgs(model_path="x", speculative_algorithm="EAGLE", **settings)
    text = tiny_mtp_config().text
    other = other_of(text, args, draft_depths=2)
    sampler = DeviceSampler(vocabulary=VOCAB, slots=4, device=CPU, arch="gfx942")
    assert other.token_counts == sampler.counts.nbytes
    assert other.draft_logits == logits.nbytes
    assert other_of(text, EngineArgs(model_path="x")).draft_logits == 0


def test_split_keys_are_what_attention_takes(small_config_path):
    pytest.importorskip("triton")
    from inkling_rocm.ops import rel_attention_triton as op

    text = load_config(small_config_path).text
    for heads in (text, rank_text(text, 8)):
        for running, depths, tokens in ((256, 0, 1), (200, 3, 8), (7, 1, 2)):
            sizes = op._workspace_sizes(256 if running > 8 else 8, tokens, heads.global_attention)
            ragged = op._workspace_sizes(256 if running > 8 else 8, 16, heads.global_attention)
            most = max(4 * sizes["partial"], min(4 * ragged["partial"], op.RAGGED_SPLIT_BYTES))
            assert other_memory_module.split_bytes(heads, running, depths, depths) == most


def other_of(text, args, *, draft_depths=0, max_running=3, chunk=64):
    return other_memory(
        text,
        args,
        chunk=chunk,
        max_running=max_running,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        draft_depths=draft_depths,
        block_drafts=0,
    )


def test_a_plan_leaves_room_for_forwards_and_graphs(small_config_path, monkeypatch):
    """However large a share is asked for; without graphs there is none for them."""
    config = load_config(small_config_path)
    held = {}
    for off in (False, True):
        settings = {"mem_fraction_static": 0.99, "disable_cuda_graph": off}
        plan = plan_of(
            config,
            free=80 * GIB,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            monkeypatch=monkeypatch,
            **settings,
        )
        held[off] = held_bytes(config.text, plan, torch.bfloat16)
        assert held[off] + plan.other.total <= 80 * GIB
        assert (plan.other.graphs == 0) == off
    assert held[True] > held[False]


def test_forwards_that_do_not_fit_are_refused_by_name(small_config_path, monkeypatch):
    config = load_config(small_config_path)
    with pytest.raises(ValueError, match=r"forward 1\d\d\.\d\d GiB.*graphs") as caught:
        plan_of(
            config,
            free=20 * GIB,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            chunked_prefill_size=-1,
            monkeypatch=monkeypatch,
        )
    assert "chunked_prefill_size" in str(caught.value)


def test_ranks_share_the_widest_half(small_config_path):
    text = load_config(small_config_path).text
    off = {"disable_prefill_cuda_graph": True}
    one = other_of(text, EngineArgs(model_path="x", **off), chunk=8192)
    two = other_of(text, EngineArgs(model_path="x", tp_size=2), chunk=8192)
    assert 0.5 < two.forward / one.forward < 1
    adaptive = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
    some = other_of(text, EngineArgs(model_path="x", **adaptive), draft_depths=3)
    more = {**adaptive, "speculative_adaptive": True}
    most = other_of(text, EngineArgs(model_path="x", **more), draft_depths=3)
    assert most.graphs > some.graphs > one.graphs


@pytest.mark.gpu
def test_what_a_gpu_takes_is_what_was_planned(small_config_path, tmp_path, monkeypatch):
    """At the real width, with as few layers as have both kinds. Of graphs only their memory pool
    is seen: torch's allocator knows this process alone, unlike the device."""
    (tmp_path / "config.json").write_text(small_config_path.read_text())
    settings = {"json_model_override_args": '{"num_hidden_layers": 3}', "load_format": "dummy"}
    settings |= {"context_length": 8192, "max_running_requests": 64, "skip_tokenizer_init": True}
    plans, plan_engine = [], build_core.plan_engine

    def planned(*args, **kwargs):
        gc.collect()  # engines of other tests: what they give back later would be taken from ours
        before = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        plans.append((before, plan_engine(*args, **kwargs)))
        return plans[-1][1]

    monkeypatch.setattr(build_core, "plan_engine", planned)
    with Engine(EngineArgs(model_path=str(tmp_path), **settings)) as engine:
        host = engine._core.executor.host
        held = [*(pool.storage for pool in host.pools), *host.rings.storage]
        ((before, plan),) = plans
        pools = before + sum(t.nbytes for t in held)
        engine.generate(
            input_ids=[[3 + r] * 4000 for r in range(16)], sampling_params={"max_new_tokens": 4}
        )
        taken = torch.cuda.max_memory_reserved() - pools
    # No batch here is large enough for all split keys.
    assert (plan.other.total - plan.other.split_keys) / 6 < taken <= plan.other.total
