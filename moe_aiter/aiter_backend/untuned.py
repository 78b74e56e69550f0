"""The shapes to hand to aiter's tuner; `python -m moe_aiter.aiter_backend.untuned` writes FILE.

No release has tuned rows for Inkling. On an AMD machine, in a checkout of aiter:

    python csrc/ck_gemm_moe_2stages_codegen/gemm_moe_tune.py -i FILE -o inkling_tuned_fmoe.csv
    AITER_CONFIG_FMOE=inkling_tuned_fmoe.csv inkling-rocm serve ...

The keys are what a call of ours looks up: shared experts folded in, so top-k 8 of X + 2 experts;
token counts as aiter rounds them (16, powers of two, 1024 for more).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parent / "inkling_untuned_fmoe.csv"
COLUMNS = (
    "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a",
    "q_dtype_w", "q_type", "use_g1u1", "doweight_stage1",
)  # fmt: skip
TOKENS = (16, 32, 64, 128, 256, 512, 1024)
EXPERTS, TOP_K, SHARED = 256, 6, 2
# Hidden size, expert width.
MODELS = {"inkling": (6144, 3072), "inkling_small": (4096, 2048)}


def rows() -> Iterator[tuple]:
    """One row a shape and token count: both models at TP4, TP8 and EP8."""
    bf16 = "torch.bfloat16"
    for hidden, width in MODELS.values():
        for experts, inner in (
            (EXPERTS, width // 4), (EXPERTS, width // 8), (EXPERTS // 8, width)
        ):  # fmt: skip
            for tokens in TOKENS:
                yield (
                    tokens, hidden, inner, experts + SHARED, TOP_K + SHARED, "ActivationType.Silu",
                    bf16, bf16, bf16, "QuantType.No", 1, 0,
                )  # fmt: skip


def main() -> None:
    """Write the table to standard output."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows())


if __name__ == "__main__":
    main()
