"""`bench serve` against a stand-in server: what it asks, what it reports, and what it says where it cannot."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.streaming_server import StreamingServer, event, token
from mooncake_connector.cli.bench.commands import app
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve import client, command, compare, engines
from mooncake_connector.cli.bench.serve.answer import Answer
from mooncake_connector.cli.bench.serve.engines import ALONE, OURS
from mooncake_connector.cli.bench.serve.load import CacheTokens, Pass
from mooncake_connector.cli.bench.serve.report import NEW, SEEN, Absent, ServeReport, row_of
from mooncake_connector.cli.bench.serve.workload import Workload, text_prompts, token_prompts

SMALL = ["--requests", "8", "--prefixes", "2", "--prefix-tokens", "64", "--rounds", "1"]
QWEN3 = {
    "vocab_size": 257,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def stand_in():
    with StreamingServer() as server:
        yield server


@pytest.fixture
def ask(monkeypatch):
    """The command, with its error as the message that a person reads."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def ask(*arguments: str) -> dict:
        result = CliRunner().invoke(app, ["serve", "--json", *SMALL, *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout.splitlines()[-1])

    return ask


def test_every_prefix_is_asked_once_when_it_is_new_and_equally_often_after_that(stand_in, ask):
    stand_in.behaviour.stream = [token("a", finish_reason="stop")]  # no usage: 1.3 tokens a word
    found = ask(stand_in.url)
    new, seen = found["rows"]
    assert (new["prompts"], new["requests"], seen["prompts"], seen["requests"]) == (NEW, 2, SEEN, 8)
    trial, *asked = [body["prompt"] for body in stand_in.behaviour.asked]
    prefixes = [prompt.rsplit(" ", 25)[0] for prompt in asked]  # a question of 32 tokens
    assert len({*prefixes}) == 2 and {prefixes.count(prefix) for prefix in prefixes} == {5}
    assert len({*asked}) == 8 and trial not in asked
    assert len(trial) <= 64, "the trial fits wherever the prompts fit, also where a token is a byte"
    assert (new["failed"], seen["failed"], seen["answers_compared"], seen["answers_differ"]) == (0, 0, 2, 0)


def test_prompts_are_new_in_every_run_unless_a_seed_is_given(stand_in, ask):
    def prompts(*arguments):
        stand_in.behaviour.asked.clear()
        found = ask(stand_in.url, *arguments)
        return sorted(body["prompt"] for body in stand_in.behaviour.asked), found["settings"]["seed"]

    first, seed = prompts()
    second, _ = prompts()
    assert first != second
    assert prompts("--seed", str(seed)) == (first, seed)


def test_failed_requests_are_in_the_report(stand_in, ask):
    def fail_later(*arguments):
        return 500 if len(stand_in.behaviour.asked) > 6 else 200

    type(stand_in.behaviour).status = property(fail_later, lambda self, value: None)
    try:
        _, seen = ask(stand_in.url, "--concurrency", "1")["rows"]
    finally:
        del type(stand_in.behaviour).status
    assert (seen["requests"], seen["failed"]) == (8, 5)
    assert "answered 500" in seen["failure"]


def test_tokens_of_the_caches_come_from_the_server_s_counters(stand_in, ask):
    stand_in.behaviour.metrics = 'vllm:prompt_tokens_by_source_total{source="local_compute"} 5\n'
    new, _ = ask(stand_in.url)["rows"]
    assert (new["tokens_computed"], new["tokens_engine_cache"], new["tokens_connector"]) == (0, 0, 0)
    stand_in.behaviour.metrics = None
    new, _ = ask(stand_in.url)["rows"]
    assert new["tokens_computed"] is None


def test_a_server_that_does_not_know_stream_options_is_asked_without(stand_in, ask):
    stand_in.behaviour.refuses = "stream_options"
    stand_in.behaviour.stream = [token("a", finish_reason="stop")]
    assert ask(stand_in.url)["rows"][1]["failed"] == 0


def test_answers_that_change_are_counted(stand_in, ask):
    class Drifting(list):
        def __iter__(self):
            return iter([token(str(len(stand_in.behaviour.asked)), finish_reason="stop")])

    stand_in.behaviour.stream = Drifting()
    _, seen = ask(stand_in.url)["rows"]
    assert (seen["answers_compared"], seen["answers_differ"]) == (2, 2)


def test_the_key_of_the_environment_is_sent_and_not_shown(stand_in, ask, monkeypatch):
    stand_in.behaviour.key = "sk-secret"
    with pytest.raises(BenchError, match="asks for a key: set OPENAI_API_KEY"):
        ask(stand_in.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with pytest.raises(BenchError, match="is not taken") as caught:
        ask(stand_in.url)
    assert "sk-wrong" not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert "sk-secret" not in json.dumps(ask(stand_in.url))


@pytest.mark.parametrize(
    ("models", "arguments", "reason"),
    [
        ((500, "text/plain", b""), [], "/v1/models answered 500"),
        ((404, "text/html", b"<html>"), [], "answered 404.*--served-model-name"),
        ((200, "text/html", b"<html>hello</html>"), [], "text/html that lists no models"),
        ((200, "application/json", b"[]"), [], "lists no models"),
        ((200, "application/json", b"[" * 100_000), [], "lists no models"),
        ((200, "application/json", b'{"data": []}'), [], "has 0 models"),
        ((200, "application/json", b'{"data": [{"id": "a"}, {"id": "b"}]}'), [], "has 2 models.*a, b"),
        ((200, "application/json", b'{"data": [{"id": "a"}]}'), ["--served-model-name", "c"], "no model 'c': it has a"),
        ((200, "application/json", b'{"data": [{"id": "a", "max_model_len": 100}]}'), [], "max_model_len of 100"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_with_what_to_do(stand_in, ask, models, arguments, reason):
    stand_in.behaviour.models = models
    with pytest.raises(BenchError, match=reason):
        ask(stand_in.url, *arguments)


def test_a_server_that_sends_without_end_fills_no_memory(stand_in, ask, monkeypatch):
    monkeypatch.setattr(client, "_LARGEST", 1 << 20)
    stand_in.behaviour.models = (200, "application/json", b" " * ((1 << 20) + 1))
    with pytest.raises(BenchError, match="sent more than 1 MiB"):
        ask(stand_in.url)


def test_a_server_without_a_list_of_models_is_asked_for_the_one_that_was_named(stand_in, ask):
    stand_in.behaviour.models = (404, "text/plain", b"")
    assert ask(stand_in.url, "--served-model-name", "mine")["settings"]["model"] == "mine"
    assert stand_in.behaviour.asked[0]["model"] == "mine"


def test_a_server_that_is_down(ask):
    with socket.socket() as taken, pytest.raises(BenchError, match=r"ConnectionRefusedError.*is the server up"):
        taken.bind(("127.0.0.1", 0))
        ask(f"http://127.0.0.1:{taken.getsockname()[1]}")


def test_a_server_whose_first_answer_fails(stand_in, ask):
    stand_in.behaviour.stream = [event(error={"message": "out of memory"})]
    with pytest.raises(BenchError, match=r"the first request failed: .*out of memory"):
        ask(stand_in.url)


def test_a_first_answer_with_an_absurd_count_is_as_one_without(stand_in, ask):
    usage = f'data: {{"usage": {{"prompt_tokens": {"9" * 4000}}}}}\n\n'
    stand_in.behaviour.stream = [token("a", finish_reason="stop"), usage]
    assert ask(stand_in.url)["settings"]["prompt_tokens_seen"] is None


def test_a_server_that_hangs(stand_in, ask):
    stand_in.behaviour.pause_s = 600
    with pytest.raises(BenchError, match="did not answer in time"):
        ask(stand_in.url, "--timeout", "0.3")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "either the URL of a server, or --model"),
        (["http://h", "--model", "."], "either the URL of a server, or --model"),
        (["http://h", "--requests", "2", "--prefixes", "3"], "2 requests cannot ask for 3 prefixes"),
        (["http://h", "--concurrency", "0"], "--concurrency"),
        (["http://h", "--dtype", "float32"], "--dtype: it is for the servers"),
        (["http://h", "--folder", "/tmp"], "--folder: it is for the servers"),
        (["http://h", "--vllm-python", "python"], "--vllm-python: it is for the servers"),
        (["--model", ".", "--served-model-name", "m"], "--served-model-name: it is for a server with a URL"),
        (["--model", "~nosuch/m"], "~nosuch has no home folder"),
    ],
)
def test_options_that_do_not_fit(arguments, reason):
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert reason in " ".join(result.output.replace("│", " ").split())


def test_prompts_have_their_length_and_their_seed():
    work = Workload(requests=6, prefixes=3, prefix_tokens=100, question_tokens=7)
    prompts = token_prompts(work, 50, "a")
    assert {len(prompt) for prompt in prompts} == {107} and max(max(prompt) for prompt in prompts) < 50
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 3 and len({tuple(prompt) for prompt in prompts}) == 6
    assert prompts == token_prompts(work, 50, "a") != token_prompts(work, 50, "b")
    assert {len(prompt.split()) for prompt in text_prompts(work, 2.0, "a")} == {50 + 4}


def write_config(folder: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return folder


def test_the_engine_s_cache_holds_a_third_of_the_prefixes(tmp_path):
    shape = engines.read_shape(write_config(tmp_path))
    assert (shape.vocabulary, shape.token_nbytes) == (257, 8 * 2 * 4 * 64 * 2)
    assert engines.read_shape(tmp_path, "float32").token_nbytes == 2 * shape.token_nbytes
    memory = engines.Memory.of(shape, Workload(), on_cpu=True)
    assert (memory.block_tokens, memory.blocks) == (128, 16 * 12 // 3 + 1)
    assert memory.capacity_nbytes > 2 * 16 * 1536 * shape.token_nbytes
    assert memory.share == pytest.approx(1 / 3)
    memory = engines.Memory.of(shape, Workload(concurrency=10), on_cpu=True)
    assert memory.blocks == 10 * 13 + 1, "all fit at a time"
    assert memory.share == pytest.approx(130 / 192)
    assert engines.Memory.of(shape, Workload(concurrency=32), on_cpu=True).share == 1


def test_kv_of_a_model_with_latent_attention(tmp_path):
    shape = engines.read_shape(write_config(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64))
    assert shape.token_nbytes == 8 * 576 * 2
    assert engines.Memory.of(shape, Workload(), on_cpu=True).block_tokens == 16


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "x"])
def test_a_checkpoint_of_impossible_sizes_is_named(tmp_path, name, value):
    folder = write_config(tmp_path, head_dim=None, hidden_size=512, **{name: value})
    with pytest.raises(BenchError, match=f"{name} is {value!r}, and not a whole number above 0"):
        engines.read_shape(folder)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"num_hidden_layers": "x"}', "[" * 100_000])
def test_a_folder_that_is_no_checkpoint_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BenchError, match=f"--model {tmp_path}.*checkpoint"):
        engines.read_shape(tmp_path)


def test_requests_that_are_too_long_for_the_model(tmp_path):
    shape = engines.read_shape(write_config(tmp_path))
    with pytest.raises(BenchError, match=r"9,048 tokens does not fit the model's 4,096: .* --prefix-tokens"):
        engines.Memory.of(shape, Workload(prefix_tokens=9000), on_cpu=True)


def test_where_there_is_no_room_the_advice_is_of_this_command(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "probe", lambda python: engines.Environment(python, None, {}))
    work = Workload(prefixes=10_000, prefix_tokens=4000, rounds=100, requests=10_000)
    with pytest.raises(BenchError, match="name another folder, or ask for fewer --prefixes or --rounds"):
        compare.run(
            Path("python"), write_config(tmp_path / "m"), "auto", work, engines.OWN, tmp_path, 60, lambda line: None
        )


def test_a_python_without_vllm_is_named():
    with pytest.raises(BenchError, match="it needs vLLM and mooncake-connector"):
        engines.probe(Path(sys.executable))
    with pytest.raises(BenchError, match="cannot be run: No such file or directory: "):
        engines.probe(Path("/nowhere/python"))


def test_a_python_is_found_as_a_shell_finds_it(tmp_path, monkeypatch):
    """Servers start in other folders: neither a relative path nor a bare name may reach them."""
    fake = tmp_path / "venv" / "bin" / "fakepython"
    fake.parent.mkdir(parents=True)
    fake.symlink_to(Path(__file__).parent / "fake_vllm.py")
    monkeypatch.chdir(tmp_path)
    assert engines.probe(Path("venv/bin/fakepython")).python == fake
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    assert engines.probe(Path("fakepython")).python == fake


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "ok\n(EngineCore pid=3) ERROR AssertionError: no CUDA\nRuntimeError: Engine core initialization failed\n",
            "AssertionError: no CUDA",
        ),
        ("x\nvllm.errors.SomeError: no\n\n", "vllm.errors.SomeError: no"),
        ("usage: x\nx: error: argument --block-size\n\n", "x: error: argument --block-size"),
        ("Killed", "Killed"),
        ("\n", "it ended and said nothing"),
    ],
)
def test_the_reason_of_a_server_s_end_is_its_first_error(log, reason):
    assert engines.failure_in(io.BytesIO(log.encode())) == reason


def answer(first: float, text: str = "a") -> Answer:
    return Answer(first, text, (), None)


def test_a_row_takes_all_rounds_together():
    passes = [
        Pass(2.0, (answer(0.1), answer(0.2), None), "timed out", CacheTokens(1, 2, 3)),
        Pass(1.0, (answer(0.3), answer(0.4, "b"), answer(0.5)), None, CacheTokens(10, 20, 30)),
    ]
    right = [(answer(9), answer(9), answer(9)), (answer(9), answer(9), None)]
    row = row_of("x", SEEN, passes, right)
    assert (row.requests, row.failed, row.failure) == (6, 1, "timed out")
    assert row.requests_per_second == pytest.approx(5 / 3) and row.rounds == [1.0, 3.0]
    assert (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s) == (0.3, 0.5, 0.5)
    assert (row.tokens_computed, row.tokens_engine_cache, row.tokens_connector) == (11, 22, 33)
    assert (row.answers_compared, row.answers_differ) == (4, 1)


def report() -> ServeReport:
    right = [(answer(1.0),)]
    rows = [
        row_of(server, prompts, [Pass(seconds, (answer(seconds),), None, CacheTokens(1536, 0, 0))], right)
        for server, prompts, seconds in ((ALONE, NEW, 1.0), (ALONE, SEEN, 0.9), (OURS, NEW, 1.1), (OURS, SEEN, 0.1))
    ]
    settings = {"requests": 64, "prefixes": 16, "prefix_tokens": 1536, "concurrency": 4, "model": "qwen3"}
    settings |= {"engine_cache_share": 0.68}
    machine = {"cpu": "a CPU", "cores": 2}
    return ServeReport(machine, {"vllm": "1"}, settings, rows, [Absent("[bold]X[/]", "no [red]GPU")])


def test_noise_and_failures_are_warned_of():
    failed = row_of("x", SEEN, [Pass(1.0, (answer(1.0), None), "broke", None)], None)
    noisy = row_of("y", SEEN, [Pass(1.0, (answer(1.0),), None, None), Pass(2.0, (answer(1.0),), None, None)], None)
    warnings = ServeReport({}, {}, {}, [failed, noisy], []).warnings()
    assert warnings[0] == "x, seen prompts: 1 of 2 requests failed: broke"
    assert warnings[1].startswith("y, seen prompts: the rounds are 100% apart")


def test_a_report_that_cannot_be_written_is_one_line(stand_in):
    command = [sys.executable, "-m", "mooncake_connector.cli.main", "bench", "serve", stand_in.url, *SMALL]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: the report cannot be written: No space left on device"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_was_ignored_stays_ignored(number):
    """As `nohup` starts it."""
    former = signal.signal(number, signal.SIG_IGN)
    try:
        with command.ended_like_ctrl_c():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, former)


def test_what_did_not_run_is_told_as_it_is():
    assert report().absent_lines() == ["not measured: [bold]X[/]: no [red]GPU"]
