"""The benchmark's arithmetic, its clients, and its commands on a tiny model."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from typer.testing import CliRunner

from inkling_rocm.bench.clients import HttpClient
from inkling_rocm.bench.layer import Case, LayerBench
from inkling_rocm.bench.serving import send
from inkling_rocm.bench.workload import Outcome, Task, random_tasks, summary
from inkling_rocm.cli.main import app
from inkling_rocm.config import parse_config
from inkling_rocm.config_override import override_config
from inkling_rocm.engine import EngineArgs
from inkling_rocm.engine.load import EngineParts
from tests.engine.tiny import tiny_config, tiny_model

WORK = {"num_prompts": 20, "input_len": 40, "output_len": 10, "vocabulary": 99, "seed": 4}


def test_tasks_repeat_with_the_seed_and_keep_their_bounds():
    tasks = random_tasks(**WORK, range_ratio=0.5, request_rate=10.0)
    assert tasks == random_tasks(**WORK, range_ratio=0.5, request_rate=10.0)
    assert tasks != random_tasks(**{**WORK, "seed": 5}, range_ratio=0.5, request_rate=10.0)
    assert {len(t.prompt_ids) for t in tasks} <= set(range(20, 41))
    assert {t.output_len for t in tasks} <= set(range(5, 11))
    arrivals = [t.arrival for t in tasks]
    assert arrivals == sorted(arrivals)
    assert 0.5 < arrivals[-1] < 6  # 20 arrivals at 10 a second
    assert not any(t.arrival for t in random_tasks(**WORK, range_ratio=1, request_rate=1e999))
    with pytest.raises(ValueError, match="request rate 0"):
        random_tasks(**WORK, range_ratio=1, request_rate=0)


def test_summary_by_hand():
    a = Outcome(prompt_len=10, sent=0.0, token_times=[0.5, 0.6, 0.8])
    b = Outcome(prompt_len=20, sent=1.0, token_times=[1.1, 1.2])
    lost = Outcome(prompt_len=5, sent=1.0, error="no")
    row = summary([a, b, lost], seconds=2.0, gpus=2)
    assert (row["completed"], row["failed"]) == (2, 1)
    assert row["output_throughput"] == 2.5
    assert row["input_throughput"] == 15
    assert row["total_throughput_per_gpu"] == 8.75
    assert row["mean_ttft_ms"] == pytest.approx(300)
    assert row["median_itl_ms"] == pytest.approx(100)
    assert row["mean_tpot_ms"] == pytest.approx(125)
    assert row["interactivity_tokens_per_s_user"] == 8
    with pytest.raises(ValueError, match="no request succeeded: no"):
        summary([lost], seconds=1.0)


class _Server(BaseHTTPRequestHandler):
    """Answers like SGLang's /generate and OpenAI's /v1/completions; counts who is in flight."""

    flying, most, lock = 0, 0, threading.Lock()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            _Server.flying += 1
            _Server.most = max(_Server.most, _Server.flying)
        native = self.path == "/generate"
        ids = body["input_ids"] if native else body["prompt"]
        bad = ids == [13]
        self.send_response(400 if bad else 200)
        self.end_headers()
        count = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        for i in range(0 if bad else count):
            message = {"meta_info": {"completion_tokens": i + 1}} if native else {
                "choices": [{"text": "x"}]}  # fmt: skip
            self.wfile.write(f"data: {json.dumps(message)}\n\n".encode())
        if bad:
            self.wfile.write(b"prompt is unlucky")
        else:
            self.wfile.write(b"data: [DONE]\n\n")
        with self.lock:
            _Server.flying -= 1

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    running = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()


@pytest.mark.parametrize("backend", ["sglang", "openai"])
def test_http_client_counts_tokens_and_keeps_concurrency(server, backend):
    _Server.most = 0
    client = HttpClient(server, backend, "m", "key")
    tasks = [Task(prompt_ids=[i], output_len=3 + i % 2, arrival=0.0) for i in range(12)]
    outcomes, seconds = send(client, tasks, max_concurrency=3, progress=False)
    assert [len(o.token_times) for o in outcomes] == [3, 4] * 6
    assert seconds >= max(o.latency for o in outcomes)
    assert _Server.most <= 3
    refused = client.run(Task(prompt_ids=[13], output_len=2, arrival=0.0))
    assert refused.error is not None
    assert "400: prompt is unlucky" in refused.error


def test_fewer_layers_are_the_first_ones(inkling_json):
    whole = parse_config(inkling_json)
    part = parse_config(override_config(inkling_json, {"num_hidden_layers": 7}))
    assert part.text.num_layers == 7
    assert part.text.layer_is_local == whole.text.layer_is_local[:7]
    assert part.text.layer_is_moe == whole.text.layer_is_moe[:7]
    nested = override_config(inkling_json, {"text_config": {"num_hidden_layers": 7}})
    assert parse_config(nested) == part
    with pytest.raises(ValueError, match="no_such_key"):
        parse_config(override_config(inkling_json, {"no_such_key": 1}))


@pytest.fixture
def inkling_json(pytestconfig):
    file = pytestconfig.rootpath / "tests" / "data" / "configs" / "inkling.json"
    return json.loads(file.read_text())


def tiny_parts():
    config = tiny_config()
    args = EngineArgs(model_path="tiny", max_running_requests=2, page_size=16)
    parts = EngineParts(
        config=config, model=tiny_model(config), tokenizer=None, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    return parts, args


def test_bars_leave_their_line_to_what_is_found(capsys):
    """A terminal shows both streams: a result would begin behind the bar."""
    parts, args = tiny_parts()
    cases = [Case(rows=rows, context=5, tokens=1) for rows in (1, 2)]
    seen = ""
    for _ in LayerBench(parts, args, cases).measure(cases):
        seen += capsys.readouterr().err  # of a fast case nothing: bars are not drawn at any rate
        assert not seen.rpartition("\r")[2].strip()
    assert "op by op" in seen


def test_layer_bench_counts_work_and_restores_the_model():
    parts, args = tiny_parts()
    model = parts.model
    case = Case(rows=2, context=30, tokens=1)
    assert case.keys(0) == 2 * 31
    assert case.keys(7) == 2 * 7
    assert Case(rows=1, context=0, tokens=4).keys(2) == 1 + 2 + 2 + 2
    before = [dict(vars(layer)) for layer in model.layers]
    ops = model.ops
    (found,) = LayerBench(parts, args, [case]).measure([case])
    assert [dict(vars(layer)) for layer in model.layers] == before
    assert model.ops is ops
    assert found.us > 0
    assert found.floor_us is None  # a CPU has no ceilings
    # Per token and layer: qkvr of H=32 to 4*8 + 2*g*8 + 4*4, o_proj of 32 to 32; g = 2, 2, 1.
    rows = sum(32 + 16 * g + 16 for g in (2, 2, 1)) + 3 * 32
    assert found.ops["linear"].flops == 2 * 2 * 32 * rows
    # 2 layers, 2 tokens, 2 chosen and 2 shared experts of 3 * 16 * 32 weights.
    assert found.ops["experts"].flops == 2 * 2 * 2 * 4 * 3 * 16 * 32
    assert found.ops["rel_attention"].flops == 4 * 4 * 8 * (14 + 14 + 62)
    assert found.ops["residual_conv_norm"].calls == 6


@pytest.mark.parametrize(
    "command",
    [
        "layer --batches 2 --context 20 --prefill 16 --rank-slice 2",
        "kernels --batches 2 --context 20",
        "offline --num-prompts 3 --random-input-len 8 --random-output-len 4 --context-length 64",
        "serving --backend inkling-rocm-engine --num-prompts 3 --random-input-len 8 "
        "--random-output-len 4 --max-concurrency 1,2 --context-length 64 "
        '--json-model-override-args {"num_hidden_layers":2}',
    ],
)
def test_commands(command, tmp_path):
    file = tmp_path / "rows.jsonl"
    words = ["bench", *command.split(), "--output-file", str(file)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    assert all(row["evidence"] == "measured" and row["arch"] == "cpu" for row in rows)
    if command.startswith("serving"):
        assert [row["max_concurrency"] for row in rows] == [1, 2]
        assert rows[0]["num_layers"] == 2
        assert rows[0]["backend"] == "inkling-rocm-engine"


def test_a_server_that_is_not_there_is_told():
    words = ["bench", "serving", "--port", "9", "--num-prompts", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "no request succeeded: nothing listens at http://127.0.0.1:9;" in done.output
