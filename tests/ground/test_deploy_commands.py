"""What a deployment file comes to: a command and an environment for each process, and `--print` for a shell."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mooncake_connector.checks import Verdict
from mooncake_connector.cli.main import app
from mooncake_connector.config.sources import load_config
from mooncake_connector.deploy.checks import events_check
from mooncake_connector.deploy.commands import Command, commands, typed
from mooncake_connector.deploy.file import read_deployment
from mooncake_connector.errors import ConfigError


def made(tmp_path: Path, text: str) -> dict[str, Command]:
    file = tmp_path / "d.yaml"
    file.write_text(text)
    return {one.name: one for one in commands(read_deployment(file), file)}


def options(command: Command) -> dict[str, str]:
    words = command.arguments
    return {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


def test_vllm_gets_roles_and_ports_that_follow_each_other(tmp_path):
    run = made(tmp_path, "engine: vllm\nmodel: ./m\nprefill: {count: 2}\ndecode: {tp: 2}")
    assert list(run) == ["prefill-0", "prefill-1", "decode-0", "router"]
    second, decode = options(run["prefill-1"]), options(run["decode-0"])
    assert run["prefill-1"].arguments[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert second["--model"] == str(tmp_path / "m") and second["--port"] == "8101"
    assert json.loads(second["--kv-transfer-config"])["kv_role"] == "kv_producer"
    assert json.loads(decode["--kv-transfer-config"])["kv_role"] == "kv_consumer"
    assert decode["--tensor-parallel-size"] == "2" and "--tensor-parallel-size" not in second
    assert run["decode-0"].url == "http://127.0.0.1:8200"
    assert run["prefill-0"].env == {} and run["prefill-0"].listens == (("127.0.0.1", 8100),)


def test_tiers_come_to_each_instance_as_the_file_has_them(tmp_path):
    tiers = [{"kind": "mooncake", "master": "10.0.0.1:50051", "soft_pin": True}, {"kind": "mooncake", "name": "two"}]
    named = made(tmp_path, "engine: vllm\nmodel: owner/m\nconnector: {tiers: [mooncake]}")
    run = made(tmp_path, f"engine: vllm\nmodel: owner/m\nconnector:\n  tiers: {json.dumps(tiers)}")
    for name in ("prefill-0", "decode-0"):
        assert load_config(None, run[name].env).tiers == load_config({"tiers": tiers}, {}).tiers
        assert load_config(None, named[name].env).tiers == load_config({"tiers": ["mooncake"]}, {}).tiers


def test_in_the_concurrent_order_the_router_knows_where_prefill_instances_are_asked(tmp_path):
    run = made(tmp_path, "engine: vllm\nmodel: owner/m\nprefill: {count: 2}\nrouter: {order: concurrent}")
    assert [run[f"prefill-{n}"].env["MOONCAKE_CONNECTOR_TRANSFER_PORT"] for n in (0, 1)] == ["18100", "18101"]
    assert "http://127.0.0.1:8101,18101" in run["router"].arguments
    assert "MOONCAKE_CONNECTOR_TRANSFER_PORT" not in run["decode-0"].env
    assert options(run["decode-0"])["--model"] == "owner/m"


def test_in_the_concurrent_order_the_router_knows_the_address_as_well(tmp_path):
    (tmp_path / "secret").write_text("as long as it has to be")
    text = f"connector: {{transfer_hosts: [192.0.2.7, 192.0.2.8], secret_file: {tmp_path / 'secret'}}}"
    run = made(tmp_path, f"engine: vllm\nmodel: owner/m\nrouter: {{order: concurrent}}\n{text}")
    assert "http://127.0.0.1:8100,18100,192.0.2.7" in run["router"].arguments


def test_sglang_gets_modes_and_bootstrap_ports(tmp_path):
    run = made(tmp_path, "engine: sglang\nmodel: /m\nprefill: {port: 9000}\nconnector: {page_tokens: 32}")
    prefill, decode = options(run["prefill-0"]), options(run["decode-0"])
    assert prefill["--disaggregation-mode"] == "prefill" and prefill["--disaggregation-bootstrap-port"] == "19000"
    assert decode["--disaggregation-mode"] == "decode" and "--disaggregation-bootstrap-port" not in decode
    assert prefill["--disaggregation-transfer-backend"] == "mooncake_connector" and prefill["--page-size"] == "32"
    assert run["prefill-0"].listens == (("127.0.0.1", 9000), ("127.0.0.1", 19000))
    assert "http://127.0.0.1:9000,19000" in run["router"].arguments


def test_sglang_gets_pages_as_the_environment_of_an_instance_says(tmp_path, monkeypatch):
    monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "32")
    text = "engine: sglang\nmodel: /m\ndecode: {env: {MOONCAKE_CONNECTOR_PAGE_TOKENS: 128}}"
    run = made(tmp_path, text)
    assert [options(run[name])["--page-size"] for name in ("prefill-0", "decode-0")] == ["32", "128"]


def test_settings_arrive_as_they_were_written(tmp_path):
    text = """\
engine: vllm
model: /m
connector:
  capacity: 8GiB
  transports: [cma, tcp]
  prefix_reuse: false
  model_id: null
  load_deadline_s: 2.5
  transfer_hosts: []
"""
    config = load_config(None, dict(made(tmp_path, text)["decode-0"].env))
    assert config.capacity == 8 << 30 and config.transports == ("cma", "tcp") and config.prefix_reuse is False
    assert config.model_id is None and config.load_deadline_s == 2.5 and config.transfer_hosts == ()


def test_the_role_wins_over_both_and_gpus_are_dealt_out(tmp_path):
    text = """\
engine: vllm
model: /m
flags: --a 1
env: {X: both, Y: both}
prefill: {count: 2, tp: 2, devices: [4, 5, 6, 7], env: {X: mine}, flags: --a 2}
"""
    run = made(tmp_path, text)
    assert run["prefill-1"].arguments[-4:] == ("--a", "1", "--a", "2")
    assert run["prefill-1"].env == {"CUDA_VISIBLE_DEVICES": "6,7", "X": "mine", "Y": "both"}
    assert run["decode-0"].env == {"X": "both", "Y": "both"}


@pytest.mark.parametrize("engine, tp, pp", [
    ("vllm", "--tensor-parallel-size", "--pipeline-parallel-size"), ("sglang", "--tp-size", "--pp-size"),
])  # fmt: skip
def test_stages_of_a_pipeline_have_gpus_of_their_own(tmp_path, engine, tp, pp):
    text = f"engine: {engine}\nmodel: /m\nprefill: {{count: 2, tp: 2, pp: 2, devices: [0, 1, 2, 3, 4, 5, 6, 7]}}"
    run = made(tmp_path, text)
    assert run["prefill-1"].env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert options(run["prefill-1"])[tp] == options(run["prefill-1"])[pp] == "2"
    assert pp not in run["decode-0"].arguments


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_instances_that_do_both_hand_nothing_over(tmp_path, engine):
    run = made(tmp_path, f"engine: {engine}\nmodel: /m\nprefill: {{count: 0}}\ndecode: {{count: 3}}")
    assert list(run) == ["decode-0", "decode-1", "decode-2", "router"]
    words = " ".join(run["decode-0"].arguments)
    assert "--disaggregation" not in words and ("kv_both" in words) is (engine == "vllm")
    assert "--prefill" not in run["router"].arguments


def test_the_policy_and_what_differs_from_its_defaults_come_to_the_router(tmp_path):
    head = "engine: vllm\nmodel: /m\nrouter:\n  policy: conductor\n"
    assert "--policy conductor --silence" in " ".join(made(tmp_path, head)["router"].arguments)
    more = "  conductor: {cache_weight: 3, request_weight: 1, index: 'http://h:1', index_token_file: t}"
    line = " ".join(made(tmp_path, head + more)["router"].arguments)
    assert f"--policy conductor --cache-weight 3.0 --index http://h:1 --index-token-file {tmp_path / 't'} --sil" in line


ON = {"enable_kv_cache_events": True, "publisher": "zmq"}


def events(**more: object) -> str:
    """A flag for all instances, as JSON within a shell's text."""
    return f"--kv-events-config '{json.dumps({**ON, **more})}'"


def published(command: Command) -> dict[str, str]:
    return json.loads(options(command)["--kv-events-config"])


INDEX = "router: {policy: conductor, conductor: {index: 'http://h:1'}}"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_instance_publishes_events_at_ports_of_its_own_and_the_router_registers_them(tmp_path, engine):
    both = events(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    head = f"engine: {engine}\nmodel: /m\nhost: 0.0.0.0\nflags: >-\n  {both} --a 1\nprefill: {{count: 2}}\n"
    text = f"{head}decode:\n  flags: >-\n    --kv-events-config='{json.dumps(ON)}'\n"
    run = made(tmp_path, text + INDEX)
    first, second, decode, router = run.values()
    assert first.arguments[-4:] == tuple(shlex.split(f"{both} --a 1"))
    assert published(second) == {**ON, "endpoint": "tcp://*:5559", "replay_endpoint": "tcp://*:5560"}
    assert second.arguments[-2:] == ("--a", "1") and ("0.0.0.0", 5560) in second.listens
    last = decode.arguments[-1].removeprefix("--kv-events-config=")
    assert json.loads(last) == {**ON, "endpoint": "tcp://*:5561"}, "the last one is in force, and has a port by default"
    line = " ".join(router.arguments)
    assert f"--events {second.url},0,tcp://127.0.0.1:5559,tcp://127.0.0.1:5560 --events {decode.url},0,tcp" in line
    assert "--events" not in made(tmp_path, text)["router"].arguments
    pods = commands(read_deployment(tmp_path / "d.yaml"), tmp_path / "d.yaml", hosts="{role}-{number}")
    assert [one.events[0][0] for one in pods[:3]] == [f"tcp://{one.name}:5557" for one in pods[:3]]


def test_ports_of_events_follow_each_other_in_each_role_from_where_it_begins(tmp_path):
    text = "engine: vllm\nmodel: /m\n"
    for role, port in (("prefill", 7), ("decode", 9)):
        flag = events(endpoint=f"tcp://[::]:{port}", replay_endpoint=f"tcp://h:{port + 100}")
        text += f"{role}:\n  count: 3\n  flags: >-\n    {flag}\n"
    run = made(tmp_path, text)
    ports = [[port for _, port in one.listens[1:]] for one in list(run.values())[:-1]]
    assert ports == [[7, 107], [8, 108], [9, 109], [10, 110], [11, 111], [12, 112]]


@pytest.mark.parametrize(
    "engine, flag", [
        ("vllm", "-dp 2"), ("vllm", "--data_parallel_size=4 -dpl 2"), ("sglang", "--dp-size=2"),
        ("sglang", "--attn-dp-size 1 --dp-size 2"),
    ],
)  # fmt: skip
def test_each_data_parallel_rank_publishes_at_the_next_port_and_is_registered_by_itself(tmp_path, engine, flag):
    both = events(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5567")
    run = made(tmp_path, f"engine: {engine}\nmodel: /m\nflags: >-\n  {flag} {both}\n{INDEX}")
    first, second, router = run.values()
    assert published(second) == {**ON, "endpoint": "tcp://*:5559", "replay_endpoint": "tcp://*:5569"}
    assert [port for _, port in second.listens[-4:]] == [5559, 5569, 5560, 5570]
    line = " ".join(router.arguments)
    for url, port in ((first.url, 5557), (second.url, 5559)):
        for rank in range(2):
            of = f"--events {url},{rank},tcp://127.0.0.1:{port + rank},tcp://127.0.0.1:{port + rank + 10}"
            assert of in line


def test_ports_at_which_the_ranks_of_one_instance_would_meet_are_told(tmp_path):
    both = events(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    with pytest.raises(ConfigError, match=r"5557 and 5558, but each of 2 .*: set them 2 apart"):
        made(tmp_path, f"engine: vllm\nmodel: /m\nflags: >-\n  -dp 2 {both}")


def test_dotted_flags_of_vllm_take_the_place_of_json(tmp_path):
    of = "--kv-events-config."
    flags = f"{of}publisher zmq {of}enable_kv_cache_events=true {of}endpoint tcp://*:7000 --a 1 {events(endpoint='x')}"
    run = made(tmp_path, f"engine: vllm\nmodel: /m\nflags: >-\n  {flags}\n{INDEX}")
    first, second, _ = run.values()
    assert first.arguments[-8:] == tuple(shlex.split(flags)[-8:]) and first.events == (("tcp://127.0.0.1:7000",),)
    assert f"{of}publisher" in second.arguments and f"{of}endpoint" not in second.arguments
    assert second.arguments[-1] == f"{of}endpoint=tcp://*:7001" and second.events == (("tcp://127.0.0.1:7001",),)


@pytest.mark.parametrize("value, why", [
    ("{", "no JSON"), ("[]", "no JSON"), ('{"endpoint": 7}', "no JSON"), ("{}", "publishes nothing"),
    ('{"enable_kv_cache_events": true, "publisher": "null"}', "publishes nothing"),
    ('{"enable_kv_cache_events": true, "endpoint": "tcp://10.0.0.1:5557"}', "publishes at tcp://10.0.0.1:5557"),
    ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}', "publishes at tcp://*:0"),
    ('{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/events"}', "publishes at ipc:///tmp/events"),
    ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:1"}\' -dpr \'4', "-dpr says which"),
])  # fmt: skip
def test_events_that_go_to_no_port_of_an_instance_are_left_as_they_are_and_it_is_told_why(tmp_path, value, why):
    run = made(tmp_path, f"engine: vllm\nmodel: /m\nflags: >-\n  --kv-events-config '{value}'\n{INDEX}")
    for one in (run["prefill-0"], run["decode-0"]):
        assert one.arguments[-1] in value and one.events == () and why in one.unheard
    assert "--events" not in run["router"].arguments
    (check,) = events_check(list(run.values()))
    assert check.status is Verdict.WARNING and f"prefill-0 ({run['prefill-0'].unheard}); decode-0" in check.detail


def test_without_events_there_is_nothing_to_say_of_them(tmp_path):
    assert list(events_check(list(made(tmp_path, f"engine: vllm\nmodel: /m\n{INDEX}").values()))) == []


def test_more_ports_for_events_than_there_are_is_told(tmp_path):
    with pytest.raises(ConfigError, match="65535"):
        made(tmp_path, f"engine: vllm\nmodel: /m\nflags: >-\n  {events(endpoint='tcp://*:65535')}")


@pytest.mark.parametrize(
    "engine, peer, words",
    [
        ("vllm", "none", "--kv-connector nixl --policy round_robin --prometheus-host 127.0.0.1 --prefill http"),
        ("sglang", "18100", "--port 8000 --pd-disaggregation --prometheus-host 127.0.0.1 --prefill http"),
    ],
)
def test_the_routers_of_others_get_what_they_need(tmp_path, engine, peer, words):
    text = f"engine: {engine}\nmodel: /m\nrouter: {{kind: {engine}-router, flags: --policy x}}"
    router = made(tmp_path, text)["router"]
    line = " ".join(router.arguments)
    assert words in line and line.endswith(f":8100 {peer} --decode http://127.0.0.1:8200 --policy x")
    assert router.listens == (("127.0.0.1", 8000), ("127.0.0.1", 29000))


def test_the_metrics_of_a_router_may_have_another_port(tmp_path):
    text = "engine: sglang\nmodel: /m\nrouter: {kind: sglang-router, flags: --prometheus-port 29001}"
    assert made(tmp_path, text)["router"].listens == (("127.0.0.1", 8000), ("127.0.0.1", 29001))


def test_without_a_router_only_instances_are_run(tmp_path):
    assert list(made(tmp_path, "engine: vllm\nmodel: /m\nrouter: {kind: none}")) == ["prefill-0", "decode-0"]


def test_an_address_that_stands_for_all_is_reached_at_home(tmp_path):
    run = made(tmp_path, "engine: vllm\nmodel: /m\nhost: 0.0.0.0\nrouter: {host: '::'}")
    assert run["decode-0"].url == "http://127.0.0.1:8200" and run["router"].url == "http://[::1]:8000"


def test_a_shell_reads_what_is_printed_as_it_is_run():
    arguments = ("printenv", "--null", "it's", "$HOME", "A")
    program = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['A']]))"
    command = Command("x", "decode", (sys.executable, "-c", program, *arguments), {"A": "b 'c' $d\n"}, "", ())
    run = subprocess.run(["sh", "-c", typed(command)], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [list(arguments), "b 'c' $d\n"]


@given(
    words=st.lists(
        st.builds(
            "{}{}".format,
            st.sampled_from(["", "-", "--x", "--x=", "--hf-overrides="]),
            st.one_of(
                st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9),
                st.text(" \\\"'$;`~#*\n{}", max_size=9),
            ),
        )
    )
)
@settings(max_examples=60)
@example(words=['--hf-overrides={"a":["X Y"]}', "--x=/a$HOME;touch", "--x=`id`"])
def test_a_shell_splits_what_is_printed_into_the_words_that_are_run(words):
    command = Command("x", "decode", ("printf", "%s\\0", *words, "end"), {}, "", ())
    printed = subprocess.run(["sh", "-c", typed(command)], capture_output=True, check=True).stdout
    assert printed.decode().split("\0") == [*words, "end", ""]


def test_print_prints_each_command(tmp_path):
    file = tmp_path / "d.yaml"
    file.write_text("engine: vllm\nmodel: /m\nconnector: {capacity: 1GiB}\n")
    printed = CliRunner().invoke(app, ["up", str(file), "--print"])
    assert printed.exit_code == 0
    blocks = printed.stdout.strip().split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [
        "# prefill-0, http://127.0.0.1:8100",
        "# decode-0, http://127.0.0.1:8200",
        "# router, http://127.0.0.1:8000",
    ]
    words = shlex.split(blocks[0].partition("\n")[2])
    assert words[0] == "MOONCAKE_CONNECTOR_CAPACITY=1GiB" and words[1] == sys.executable
