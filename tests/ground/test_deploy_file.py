"""A deployment file: what it may hold, and that what is wrong in it is named with line, key, value and what to do."""

from __future__ import annotations

import json

import msgspec
import pytest
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.config.schema import Config
from mooncake_connector.deploy import docs
from mooncake_connector.deploy.file import read_deployment
from mooncake_connector.deploy.schema import Deployment, Instances, Router, folder_of
from mooncake_connector.errors import ConfigError

SMALL = "engine: vllm\nmodel: /models/m\n"
WHOLE = """\
engine: vllm
model: ./m
flags: --max-model-len 4096 --served-model-name 'my model'
env: {OMP_NUM_THREADS: 1, NAME: text}
host: 0.0.0.0
prefill: {count: 2, port: 9100, tp: 2, devices: [0, 1, 2, 3], flags: --x, env: {A: 1.5}}
decode: {}
connector:
  capacity: 8GiB
  transports: [cma, tcp]
  model_id: null
router: {kind: vllm-router, port: 9000, flags: --policy x}
logs: /tmp/logs
start_at_once: 1
start_deadline_s: 60
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> Deployment:
        path = tmp_path / "d.yaml"
        path.write_text(text)
        return read_deployment(path)

    return read


def test_engine_and_model_are_enough(read):
    assert read(SMALL) == Deployment(engine="vllm", model="/models/m")


def test_everything_can_be_said(read):
    found = read(WHOLE)
    assert found.flags == ("--max-model-len", "4096", "--served-model-name", "my model")
    assert found.env == {"OMP_NUM_THREADS": "1", "NAME": "text"}
    assert found.prefill == Instances(count=2, port=9100, tp=2, devices=(0, 1, 2, 3), flags=("--x",), env={"A": "1.5"})
    assert found.decode == Instances()
    assert found.connector == {"capacity": "8GiB", "transports": ["cma", "tcp"], "model_id": None}
    assert found.router == Router(kind="vllm-router", port=9000, flags=("--policy", "x"))
    assert (found.host, found.logs, found.start_at_once, found.start_deadline_s) == ("0.0.0.0", "/tmp/logs", 1, 60.0)


@pytest.mark.parametrize(
    "more, line, words",
    [
        ("prefil: {}", 3, "unknown key 'prefil' (did you mean prefill?); known are engine, model"),
        ("prefill:\n  count: two", 4, "prefill.count is 'two': expected an integer from 1 to 64"),
        ("decode:\n  count: 0", 4, "decode.count is 0: expected an integer from 1 to 64"),
        ("prefill:\n  count: -1", 4, "prefill.count is -1: expected an integer from 1 to 64, for prefill also 0"),
        ("router: {kind: vllm-router}\nprefill: {count: 0}", 4, "prefill.count is 0, and router.kind is 'vllm-router'"),
        ("decode:\n  tpp: 2", 4, "unknown key 'decode.tpp' (did you mean tp?)"),
        ("decode: 2", 3, "decode holds no keys with values"),
        ("decode: {port: 60000}", 3, "decode.port is 60000: expected an integer from 1 to 55535; null"),
        ("decode: {tp: true}", 3, "decode.tp is True: expected"),
        ("flags: '--x \"'", 3, "flags is '--x \"': expected text as in a shell"),
        ("flags: [--x]", 3, "flags is ['--x']: expected text as in a shell"),
        ("env: x", 3, "env is not shown here: expected names of letters, digits and _, with text or numbers"),
        ("env:\n  A: x\n  'A=B': x", 5, "env has 'A=B': expected names of letters, digits and _, with text or numbers"),
        ("env: {1: x}", 3, "env has 1: expected names of letters"),
        ("decode:\n  env:\n    A: x\n    B: true", 6, "decode.env.B is True: expected text or a number; put others"),
        ("env: {A: [hunter2]}", 3, "env.A is not shown here: expected text or a number; put others in quotes"),
        ("flags: |\n  --x 1  # why", 3, "expected text as in a shell, without comments"),
        ("flags: --port 1", 3, "flags has --port, which `up` sets itself: leave it out, and set prefill.port or"),
        ("flags: --kv_transfer_config.kv_role=x", 3, "which `up` sets itself: leave it out, and set connector"),
        ("decode:\n  tp: 2\n  flags: -tp 2", 5, "decode.flags has -tp, which `up` sets itself: leave it out, and set"),
        ("prefill: {flags: --ssl-keyfile=k}", 3, "prefill.flags has --ssl-keyfile, and `up` asks /health over http"),
        ("router: {kind: vllm-router, flags: --port 1}", 3, "router.flags has --port, which `up` sets itself"),
        ("host: localhost", 3, "host is 'localhost': expected a literal IP address"),
        ("router:\n  kind: nginx", 4, 'router.kind is \'nginx\': expected "builtin", "vllm-router"'),
        ("router:\n  kind: sglang-router", 4, "which serves sglang alone, and engine is 'vllm': expected vllm-router"),
        ("router:\n  kind: none\n  policy: least_loaded", 5, "router.policy is for a router.kind of builtin"),
        ("router:\n  kind: none\n  conductor: {}", 5, "router.conductor is for a router.kind of builtin"),
        ("router:\n  conductor: {candidates: 2}", 4, "router.conductor is for a router.policy of conductor, and"),
        (
            "router: {policy: conductor, conductor: {index: localhost}}",
            3,
            "router.conductor.index is 'localhost': expected a URL of http or https without a path",
        ),
        ("router: {policy: conductor, conductor: {prefill_weight: -1}}", 3, "expected a number from 0 to 100"),
        ("router:\n  flags: --x", 4, "router.flags is for a router.kind of vllm-router or sglang-router"),
        (
            "prefill:\n  devices: [0, 1]",
            4,
            "prefill.devices has 2 GPUs: expected 1, which is count (1) times tp (1) times pp",
        ),
        ("prefill:\n  pp: 2\n  devices: [0]", 5, "expected 2, which is count (1) times tp (1) times pp (2)"),
        (
            "prefill: {flags: -pp 2}",
            3,
            "prefill.flags has -pp, which `up` sets itself: leave it out, and set prefill.pp",
        ),
        ("prefill:\n  port: 55535\n  count: 2", 4, "which makes 55536 the last port: expected at most 55535"),
        ("start_deadline_s: 0", 3, "start_deadline_s is 0: expected a number above 0"),
        ("connector: 5", 3, "connector is 5: expected settings of mooncake-connector"),
        ("connector:\n  capacty: 8GiB", 4, "unknown configuration key 'capacty'"),
        ("connector:\n\n  page_tokens: 63", 5, "is 63: expected a power of two from 16 to 1024"),
        ("connector:\n  transfer_port: 1", 4, "connector.transfer_port is set by `up`"),
        ("connector:\n  transfer_hosts: [192.0.2.7]", 4, "set secret_file to a file with the same secret"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(read, more, line, words):
    with pytest.raises(ConfigError) as caught:
        read(SMALL + more)
    message = str(caught.value)
    assert f"d.yaml, line {line}" in message and words in message, message


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "it is empty: expected engine and model at least"),
        ("model: m", "line 1: engine is missing: expected \"vllm\" or \"sglang\""),
        ("- a", "the file holds no keys with values"),
        ("a: [", "is no deployment file: "),
        (SMALL + "model: n", "the key 'model' is there twice (line 3"),
        ("a: &x 1", "anchors and aliases"),
    ],
)  # fmt: skip
def test_what_is_no_deployment_is_refused(read, text, words):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert words in str(caught.value), caught.value


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_deployment(tmp_path / "d.yaml")


def test_a_value_that_may_be_a_secret_is_not_repeated(read):
    with pytest.raises(ConfigError) as caught:
        read(SMALL + "connector: {secret_file: hunter2-hunter2-hunter2}")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"decode\.env\.DEBUG is True: expected text or a number") as caught:
        read(SMALL + "decode: {env: {TOKEN: hunter2, DEBUG: true}}")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("engine, flags", [
    ("vllm", "--host 1 --port 1 --model x --kv-transfer-config {} --ssl-certfile x"),
    ("vllm", "--tensor-parallel-size 2 -tp=2 -pp 2 --pipeline-parallel-size 2"),
    ("sglang", "--host 1 --port 1 --model x --model-path x --page-size 1 --ssl-keyfile x"),
    ("sglang", "--tensor-parallel-size 2 --tp-size 2 --tp 2 --pp-size 2 --pp 2"),
    ("sglang", "--disaggregation-mode null --disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 1"),
])  # fmt: skip
def test_every_flag_that_is_set_already_is_refused(read, engine, flags):
    for flag in [word for word in flags.split() if word.startswith("-")]:
        with pytest.raises(ConfigError, match=f"line 3: flags has {flag.partition('=')[0]}, "):
            read(f"engine: {engine}\nmodel: /m\nflags: {flag} x\n")


def test_a_decode_instance_of_sglang_is_no_pipeline(read):
    pipelines = "model: /m\nprefill: {pp: 2}\ndecode:\n  pp: 2\n"
    assert read(f"engine: vllm\n{pipelines}").decode.pp == 2
    with pytest.raises(
        ConfigError, match=r"line 5: decode\.pp is 2, and engine is 'sglang', whose decode .* expected 1"
    ):
        read(f"engine: sglang\n{pipelines}")


def test_flags_that_only_look_like_those_are_taken(read):
    flags = "--portal 1 --disaggregation-decode-polling-interval 1 --x=--port -t p#1"
    assert read(f"engine: sglang\nmodel: /m\nflags: {flags}\n").flags == tuple(flags.split())


def test_a_home_of_nobody_is_a_folder_that_is_not_there(read, tmp_path):
    assert folder_of(read("engine: vllm\nmodel: ~nobody-of-this-name/m").model, tmp_path / "d") == (
        tmp_path / "~nobody-of-this-name" / "m"
    )


def test_the_command_prints_a_json_schema_that_knows_every_key():
    printed = CliRunner().invoke(app, ["up", "--schema"])
    assert printed.exit_code == 0 and printed.stdout == docs.schema_text()
    found = json.loads(printed.stdout)

    def agrees(part, kind, leave_out=()):
        names = [field.name for field in msgspec.structs.fields(kind) if field.name not in leave_out]
        return list(part["properties"]) == names and part["additionalProperties"] is False

    inner = found["properties"]
    assert agrees(found, Deployment) and agrees(inner["router"], Router)
    assert agrees(inner["prefill"], Instances) and agrees(inner["decode"], Instances)
    assert agrees(inner["connector"], Config, ["transfer_port"])
    assert found["required"] == ["engine", "model"]


def test_the_example_of_the_page_is_a_deployment(read):
    example = docs.render().partition("```yaml\n")[2].partition("```")[0]
    assert read(example).engine == "vllm"
