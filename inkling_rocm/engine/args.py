"""The engine's arguments, by SGLang's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PAGE_SIZES = (1, 16, 64, 128)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """How to load and run a model.

    Attributes:
        model_path: a checkpoint folder, or "demo" for the generated one.
        tokenizer_path: only the built-in o200k tokenizer exists; None.
        device: "cpu", "cuda", ...; None = a GPU if torch sees one, else the CPU.
        dtype: "auto" = the checkpoint's on a GPU, float32 on a CPU; or "bfloat16", "float16",
            "float32".
        load_format: "auto" reads the checkpoint, "dummy" makes random weights.
        skip_tokenizer_init: run on token ids only: no text, no stop strings, no constraints.
        context_length: most tokens of prompt and output together; None = what the checkpoint says,
            cut to what the page pools hold.
        page_size: tokens of a K/V page: 1, 16, 64 or 128.
        chunked_prefill_size: most prompt tokens in one forward; -1 = no limit; None = 512 on a CPU,
            8192 on a GPU. Decoding sequences add one token each on top.
        max_running_requests: sequences in one batch; None = 32 on a CPU, 256 on a GPU.
        max_queued_requests: requests that may wait before new ones are refused.
        max_total_tokens: tokens the global page pool holds; None = from mem_fraction_static.
        mem_fraction_static: share of the free memory, after the weights are loaded, that pools and
            rings may take; None = 0.2 on a CPU (at most 4 GiB), 0.85 on a GPU.
        attention_backend, moe_runner_backend: "auto", or the variant to force.
        random_seed: from which seeds of requests without one are drawn, and dummy weights.
        served_model_name: None = model_path.
        check_invariants: assert the host invariants on every step.
    """

    model_path: str
    tokenizer_path: str | None = None
    device: str | None = None
    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    skip_tokenizer_init: bool = False
    context_length: int | None = None
    page_size: int = 64
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int = 1024
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    attention_backend: str = "auto"
    moe_runner_backend: str = "auto"
    random_seed: int = 0
    served_model_name: str | None = None
    check_invariants: bool = False

    def __post_init__(self):
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size {self.page_size}: choose from {PAGE_SIZES}")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f'load_format {self.load_format!r}: choose from "auto", "dummy"')
        if self.tokenizer_path not in (None, self.model_path):
            raise ValueError(
                f"tokenizer_path {self.tokenizer_path!r}: only the model's own o200k tokenizer is "
                "supported; leave it out"
            )
        if self.chunked_prefill_size is not None and (
            self.chunked_prefill_size < 1 and self.chunked_prefill_size != -1
        ):
            raise ValueError(
                f"chunked_prefill_size {self.chunked_prefill_size}: wanted -1 (no limit) or at "
                "least 1"
            )
        for name in ("context_length", "max_running_requests", "max_total_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: wanted at least 1")
        if self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests {self.max_queued_requests}: wanted at least 0")
        share = self.mem_fraction_static
        if share is not None and not 0 < share < 1:
            raise ValueError(f"mem_fraction_static {share}: wanted a value between 0 and 1")
