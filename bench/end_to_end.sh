#!/usr/bin/env bash
# Layers, the engine, the peer and (with two GPUs) tensor parallelism, one after the other; about
# ten minutes on an H200, more where no kernel has been compiled yet. Rows, plot and logs go to the
# folder given.
#
#     bench/end_to_end.sh OUT
#
# A part that fails does not stop the next ones; the script's exit status says whether one did.
set -u
out=${1:?usage: bench/end_to_end.sh OUT}
mkdir -p "$out"
whole=tests/data/configs/inkling.json small=tests/data/configs/inkling_small.json
failed=0
part() {
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1 || { failed=1; echo "failed, see $out/$name.log"; }
    tail -n 4 "$out/$name.log"
}
bench() { python -m inkling_rocm bench "$@"; }
export -f bench

# Correctness before speed: the engine's tests on this GPU.
part tests 300 python -m pytest -q -m gpu tests/engine/test_gpu.py tests/host_invariants
part layer 200 bash -c "bench layer --model-path $whole --rank-slice 8 \
    --json-model-override-args '{\"num_hidden_layers\": 12}' --batches 1,8,32,128 --context 8192 \
    --prefill 8192 --output-file $out/rows.jsonl"
part steps 120 python -m bench.engine_gpu --config $small --layers 8 --batches 1,8,32,128 \
    --prompt 256 --context-length 2048 --output-file "$out/rows.jsonl"
part serving 240 bash -c "bench serving --backend inkling-rocm-engine --model $small \
    --json-model-override-args '{\"num_hidden_layers\": 8}' --num-prompts 128 --random-input-len 1024 \
    --random-output-len 128 --random-range-ratio 1 --max-concurrency 1,2,4,8,16,32,64,128 \
    --warmup-requests 64 --context-length 8192 --plot $out/serving.png --output-file $out/rows.jsonl"
part peer 300 python -m bench.small_stack --config $small --layers 6 --batches 1,32 --context 1024 \
    --out $out/rows.jsonl
if [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
    part tp_tokens 120 python -m bench.tensor_parallel --config $small --layers 3 --dtype float32 \
        --batches "" --prefill 0
    part tp_speed 200 python -m bench.tensor_parallel --config $small --layers 6 \
        --output-file $out/rows.jsonl
fi
exit $failed
