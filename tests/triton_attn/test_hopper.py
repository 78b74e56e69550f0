"""Which verify calls go over warp groups on sm90; that the cases of these rows, and of prefill's,
compile, and what they compute on a GPU."""

import pytest
import torch

import triton_attn.decode as decode
import triton_attn.hopper_verify as hopper_verify
import triton_attn.hopper_window as hopper_window
from kernel_base.arch import arch_of_device
from tests.support.offline import compile_only, facts
from triton_attn import RelativeBias, RelativeProfile, ScoreMod, attention_verify
from triton_attn.hopper_operands import feature_tokens
from triton_attn.register import ENTRIES

BF16 = torch.bfloat16


def verify(heads, kv_heads, tokens, *, requests=3, mod="bias", page_size=128, d_rel=16, **options):
    """A call on sm90 with real strides; nothing runs."""

    def i32(*shape):
        return torch.zeros(*shape, dtype=torch.int32)

    T, dtype = requests * tokens, options.pop("dtype", BF16)
    head_dim = options.pop("head_dim", 128)
    if mod == "bias":
        projection = torch.zeros(d_rel, 512, dtype=dtype)
        mod = RelativeBias(
            r=torch.zeros(T, heads, d_rel, dtype=dtype),
            profile=RelativeProfile.prepare(projection),
            tau=torch.ones(T),
        )
    pages = torch.zeros(9, page_size, kv_heads, head_dim, dtype=dtype)
    attention_verify(
        torch.zeros(T, heads, head_dim, dtype=dtype), pages, pages, page_table=i32(requests, 8),
        first_page=i32(requests), cu_seqlens_q=i32(requests + 1), kv_len=i32(requests),
        max_q_len=tokens, max_kv_len=8192, softmax_scale=1 / head_dim, score_mod=mod, arch="sm90",
        **options,
    )  # fmt: skip


@pytest.fixture
def taken(monkeypatch):
    """Names of what was launched."""
    names = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **__: names.append(self.name)

    for module, name in (
        (decode, "_decode_kernel"),
        (decode, "_merge_kernel"),
        (hopper_verify, "_hopper_verify_kernel"),
        (hopper_window, "_hopper_window_kernel"),
        (hopper_window, "_window_merge_kernel"),
    ):
        monkeypatch.setattr(module, name, Kernel(name))
    return names


@pytest.mark.parametrize(
    ("call", "options", "kernels"),
    [
        ((8, 1, 9), {}, ["_hopper_verify_kernel", "_merge_kernel"]),
        ((8, 1, 16), {}, ["_hopper_verify_kernel", "_merge_kernel"]),
        ((8, 1, 9), {"mod": None}, ["_hopper_verify_kernel", "_merge_kernel"]),
        ((8, 1, 9), {"page_size": 64}, ["_hopper_verify_kernel", "_merge_kernel"]),
        ((8, 1, 9), {"page_size": 16}, ["_decode_kernel", "_merge_kernel"]),
        ((8, 1, 9), {"dtype": torch.float32}, ["_decode_kernel", "_merge_kernel"]),
        ((8, 1, 9), {"head_dim": 64}, ["_decode_kernel", "_merge_kernel"]),
        ((8, 1, 9), {"d_rel": 12}, ["_decode_kernel", "_merge_kernel"]),
        ((12, 2, 9), {}, ["_decode_kernel", "_merge_kernel"]),  # six heads do not divide 64 rows
        ((16, 1, 9), {}, ["_decode_kernel", "_merge_kernel"]),  # 144 rows
        ((8, 2, 9), {"window": 512}, ["_hopper_window_kernel", "_window_merge_kernel"]),
        (
            (8, 2, 9),
            {"window": 512, "requests": 32},
            ["_hopper_window_kernel", "_window_merge_kernel"],
        ),
        ((8, 2, 9), {"window": 512, "requests": 80}, ["_hopper_window_kernel"]),
        ((8, 2, 4), {"window": 512}, ["_decode_kernel", "_merge_kernel"]),  # fits 16 rows
        ((8, 2, 16), {"window": 512}, ["_decode_kernel", "_merge_kernel"]),  # shared memory
        ((8, 1, 9), {"window": 512}, ["_decode_kernel", "_merge_kernel"]),  # 72 rows
        ((8, 2, 9), {"window": 2048}, ["_decode_kernel", "_merge_kernel"]),
    ],
)
def test_calls_that_fit_take_warp_groups(taken, call, options, kernels):
    verify(*call, **options)
    assert taken == kernels


def test_a_modification_of_ones_own_does_not(taken):
    mod = ScoreMod(fn=None, reference=None, extent=24)
    verify(8, 1, 9, mod=mod)
    assert taken[0] == "_decode_kernel"


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("block_r", [16, 32, 64])
def test_features_hold_the_tokens_of_a_warp_group(group, block_r):
    for tokens in range(1, 64 // group + 1):
        first, more = feature_tokens(group, tokens, block_r)
        assert first + more >= tokens
        assert first * block_r <= 128
        for part in (first, more):
            assert part & (part - 1) == 0


ROWS = {
    f"{entry.name.split('.')[1]}-{i}": (entry, row)
    for entry in ENTRIES
    for i, row in enumerate(entry.table.for_arch("sm90"))
    if row.constexprs.get("VARIANT") == "hopper"
}
DEFAULT = {"attention_prefill-1", "attention_decode-0", "attention_decode-1"}
NAMES = [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.full]) for n in ROWS]
KERNELS = {"_hopper_prefill_kernel", "_hopper_verify_kernel", "_hopper_window_kernel"}


@pytest.mark.parametrize("name", NAMES)
def test_the_cases_of_their_rows_compile(name):
    """Gluon's names differ between versions of Triton."""
    entry, row = ROWS[name]
    with compile_only("sm90") as kernels:
        for case in entry.cases("sm90", row):
            case.run(torch.device("cpu"))
    found = [facts(each) for each in kernels if each.name in KERNELS]
    assert found
    assert all(each.matrix for each in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ROWS)
def test_the_cases_of_their_rows_pass(name):
    if arch_of_device("cuda:0").name != "sm90":
        pytest.skip("these rows are sm90's")
    entry, row = ROWS[name]
    for case in entry.cases("sm90", row):
        for outcome in case.run(torch.device("cuda")):
            norm = outcome.reference.norm()
            error = (outcome.out.cpu().double() - outcome.reference).norm() / norm
            eager = (outcome.eager.double() - outcome.reference).norm() / norm
            assert error <= 2 * eager + torch.finfo(outcome.out.dtype).eps, case.name
