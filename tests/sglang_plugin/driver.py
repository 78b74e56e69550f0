"""Runs scenarios in SGLang's engine on a CPU.

    python driver.py CHECKPOINT PAGE_SIZE OUT SCENARIO...

Executed with SGLang's own virtual environment; writes {scenario: [{ids, cached}, ...]}.
"""

import json
import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SGLANG_USE_CPU_ENGINE"] = "0"


def main():
    checkpoint, page_size, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    import sglang
    from scenarios import SCENARIOS

    extra = json.loads(os.environ.get("DRIVER_ARGUMENTS", "{}"))
    engine = sglang.Engine(
        **{
            "model_path": checkpoint, "device": "cpu", "attention_backend": "triton",
            "skip_tokenizer_init": True, "disable_cuda_graph": True,
            "cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "disabled",
            "mem_fraction_static": 0.05, "max_total_tokens": 768, "swa_full_tokens_ratio": 1.0,
            "max_running_requests": 4, "context_length": 512, "page_size": page_size,
            "dtype": "float32", "chunked_prefill_size": max(page_size, 64),
            "disable_overlap_schedule": True, "log_level": "warning", "skip_server_warmup": True,
            "max_mamba_cache_size": 40, "mamba_track_interval": max(page_size, 64),
            **extra,
        }
    )  # fmt: skip
    results = {}
    for name in sys.argv[4:]:
        results[name] = [
            {
                "ids": r["output_ids"],
                "cached": r["meta_info"]["cached_tokens"],
                "retractions": r["meta_info"]["num_retractions"],
            }
            for r in SCENARIOS[name].run(engine)
        ]
        print(name, results[name], flush=True)
    with open(out, "w") as file:
        json.dump(results, file)
    engine.shutdown()


if __name__ == "__main__":
    main()
