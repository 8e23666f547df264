"""A deployment as files for Compose and Kubernetes: valid, with the commands of `up`, complete, and without secrets.

The Compose Specification's schema comes with check-jsonschema, Kubernetes' come with kubernetes-validate.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ground.rendering import FORMS, HIDDEN, check_valid, documents, expanded, pods, rendered
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.deploy.commands import commands
from mooncake_connector.deploy.file import read_deployment
from mooncake_connector.errors import ConfigError

MOST = examples(15)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cc", "Cs"]), max_size=20)


@st.composite
def instances(draw, first_port: int, fewest: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {
        "count": draw(st.integers(fewest, 3)),
        "tp": draw(st.integers(1, 2)),
        "env": draw(st.dictionaries(st.sampled_from(["A", "OMP_NUM_THREADS", "HF_TOKEN"]), TEXT.map(str))),
    }
    if "HF_TOKEN" in found["env"]:
        found["env"]["HF_TOKEN"] = HIDDEN
    if draw(st.booleans()):
        found["devices"] = list(range(found["count"] * found["tp"]))
    if draw(st.booleans()):
        found["port"] = draw(st.integers(first_port, first_port + 50))
    return found


@st.composite
def deployments(draw) -> dict[str, Any]:
    engine = draw(st.sampled_from(["vllm", "sglang"]))
    kind = draw(st.sampled_from(["builtin", f"{engine}-router", "none"]))
    router: dict[str, Any] = {"kind": kind, "port": draw(st.integers(1, 8000))}
    if kind == "builtin":
        router["order"] = draw(st.sampled_from(["sequential", "concurrent"]))
    connector = draw(st.fixed_dictionaries({}, optional={
        "capacity": st.sampled_from(["8GiB", 1 << 30, None]),
        "prefix_reuse": st.booleans(),
        "pool": st.sampled_from(["/dev/shm/p", None]),
        "transports": st.just(["cma", "tcp"]),
    }))  # fmt: skip
    return {
        "engine": engine,
        "model": draw(st.sampled_from(["/models/m", "./m", "owner/m"])),
        "flags": draw(st.sampled_from(["", f"--api-key {HIDDEN} {HIDDEN} --x", f"--hf-token={HIDDEN} --x '$(A) $B'"])),
        "host": draw(st.sampled_from(["127.0.0.1", "0.0.0.0", "::1", "192.0.2.7"])),
        "prefill": draw(instances(9100, fewest=0 if kind in ("builtin", "none") else 1)),
        "decode": draw(instances(9200)),
        "connector": connector,
        "router": router,
        "render": draw(st.fixed_dictionaries({}, optional={
            "name": st.sampled_from(["llm", "a", "x" * 40]),
            "image": st.sampled_from(["registry.example.com:5000/x/y:1", "a@sha256:0", None]),
            "gpus": st.booleans(),
            "claim": st.sampled_from(["models", None]),
        })),
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("deployment")


@pytest.mark.parametrize("form", FORMS)
@given(content=deployments())
@settings(max_examples=MOST)
def test_what_is_rendered_is_valid_and_holds_no_secret(folder, form, content):
    text = rendered(folder, content, form)
    check_valid(text, form)
    assert HIDDEN not in text
    assert text == rendered(folder, content, form)


@pytest.mark.parametrize("form", FORMS)
def test_the_check_finds_a_field_that_does_not_exist(folder, form):
    text = rendered(folder, "engine: vllm\nmodel: /m", form)
    field = "healthcheck" if form == "compose" else "readinessProbe"
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        check_valid(text.replace(f"{field}:", f"{field}z:"), form)


def as_anywhere(arguments: list[str]) -> list[str]:
    """A command without what depends on the host: where programs are, addresses, and instances by address and port."""
    words = [expanded(word) for word in arguments]
    words[0] = "python3" if words[0] == sys.executable else os.path.basename(words[0])
    kept: list[str] = []
    option = ""
    for word in words:
        option = word if word.startswith("--") else option
        kept += (
            [word] if word == option or option not in ("--host", "--prometheus-host", "--prefill", "--decode") else []
        )
    return kept


@pytest.mark.parametrize("form", FORMS)
@given(content=deployments())
@settings(max_examples=MOST)
def test_the_commands_are_those_of_up(folder, form, content):
    text = rendered(folder, {**content, "flags": "--x '$(A) $B'"}, form)
    run = commands(read_deployment(folder / "d.yaml"), folder / "d.yaml", environ={})
    if form == "compose":
        services = yaml.safe_load(text)["services"]
        assert list(services) == ["pod", *(one.name for one in run)]
        found = {name: (one["entrypoint"], one.get("environment", {})) for name, one in services.items()}
    else:
        found = {}
        for role, pod in pods(text).items():
            container = pod["spec"]["containers"][0]
            env = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
            found["router" if role == "router" else f"{role}-0"] = (container["command"], env)
            assert role == "router" or pod["replicas"] == content[role]["count"]
        run = [one for one in run if one.name in found]
        assert len(run) == len(found)
    of_the_host = {"CUDA_VISIBLE_DEVICES", "MOONCAKE_CONNECTOR_TRANSPORTS"} if form != "compose" else set()
    for one in run:
        arguments, env = found[one.name]
        assert as_anywhere(arguments) == as_anywhere([word.replace("$", "$$") for word in one.arguments])
        wanted = {name: text for name, text in one.env.items() if name not in of_the_host and text != HIDDEN}
        if wanted.get("MOONCAKE_CONNECTOR_CAPACITY") == "null" and content["connector"].get("prefix_reuse", True):
            wanted["MOONCAKE_CONNECTOR_CAPACITY"] = "4GiB"  # what is free does not say it in a container
        assert {name: expanded(env[name]) for name in wanted} == wanted


@pytest.mark.parametrize("form", ["k8s", "rbg"])
@given(content=deployments())
@settings(max_examples=MOST)
def test_whoever_is_named_is_there_and_listens(folder, form, content):
    """Every URL of the router is a pod of a StatefulSet below its headless Service, at a port of its container."""
    text = rendered(folder, content, form)
    found, name = pods(text), content["render"].get("name", "llm")
    services = {one["metadata"]["name"]: one["spec"] for one in documents(text) if one["kind"] == "Service"}
    hosts = set()
    for role, pod in found.items():
        container, labels = pod["spec"]["containers"][0], pod["metadata"]["labels"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        words = container["command"]
        assert ports["http"] == int(words[words.index("--port") + 1])
        by_option = [int(words[at + 1]) for at, word in enumerate(words) if word.endswith("bootstrap-port")]
        by_env = [int(one["value"]) for one in container.get("env", []) if one["name"].endswith("TRANSFER_PORT")]
        assert by_option + by_env == ([ports["peer"]] if "peer" in ports else [])
        if role == "router":
            service = services[name]
        elif form == "k8s":
            service = services[f"{name}-{role}"]
            assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
        else:
            service = None  # the group's controller makes it, and calls it so
        if service is not None:
            assert service["selector"] == labels
            assert {one["name"]: (one["port"], one["targetPort"]) for one in service["ports"]} == {
                key: (port, key) for key, port in ports.items()
            }
        below = f"{name}-{role}" if form == "k8s" else f"s-{name}-{role}"
        hosts |= {
            (role, f"{name}-{role}-{at}.{below}", ports["http"], ports.get("peer")) for at in range(pod["replicas"])
        }
    for one in documents(text):
        if one["kind"] in ("StatefulSet", "Deployment"):
            assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
        if one["kind"] == "StatefulSet":
            assert one["spec"]["serviceName"] in services
    if "router" not in found:
        assert name not in services
        return
    words = found["router"]["spec"]["containers"][0]["command"]
    named = set()
    for at, word in enumerate(words):
        if word in ("--prefill", "--decode"):
            url, *more = words[at + 1].split(",")
            host, port = url.removeprefix("http://").rsplit(":", 1)
            after = words[at + 2] if len(words) > at + 2 else ""
            peer = next(
                (int(one) for one in (*more, after) if one.isdecimal() and word == "--prefill" and one != "0"), None
            )
            named.add((word.strip("-"), host, int(port), peer))
    assert named == {one for one in hosts if one[0] != "router"}


@pytest.mark.parametrize(
    "more, words",
    [
        ("connector:\n  pool: /mnt/pool", "line 4: connector.pool is '/mnt/pool': expected a folder below /dev/shm"),
        ("connector:\n  pool: /dev/shm/../x", "line 4: connector.pool is '/dev/shm/../x': expected"),
        ("render:\n  name: LLM", "line 4: render.name is 'LLM': expected a lower-case letter, then up to 39"),
        ("render:\n  image: a b", "line 4: render.image is 'a b': expected the name of an image"),
        ("render:\n  gpu: false", "line 4: unknown key 'render.gpu' (did you mean gpus?)"),
    ],
)
def test_what_cannot_be_rendered_is_named_with_its_line(tmp_path, more, words):
    file = tmp_path / "d.yaml"
    file.write_text(f"engine: vllm\nmodel: /m\n{more}\n")
    run = CliRunner().invoke(app, ["up", str(file), "--render", "k8s"])
    assert run.exit_code == 1 and words in run.stderr and run.stdout == ""


def test_containers_that_share_a_network_need_ports_of_their_own(tmp_path):
    same = "engine: vllm\nmodel: /m\nprefill: {port: 9000}\ndecode: {port: 9000}"
    with pytest.raises(ConfigError, match="port 9000 is for prefill-0 and for decode-0: set other ports"):
        rendered(tmp_path, same, "compose")
    assert rendered(tmp_path, same, "k8s")


def test_certificates_are_not_rendered(tmp_path):
    paths = "".join(f"  tls_{one}: {tmp_path / one}\n" for one in ("certificate", "key", "authority"))
    file = tmp_path / "d.yaml"
    file.write_text(f"engine: vllm\nmodel: /m\nconnector:\n{paths}")
    run = CliRunner().invoke(app, ["up", str(file), "--render", "k8s"])
    assert "line 4: connector.tls_certificate is not rendered: leave it out" in run.stderr


def test_tiers_in_folders_are_rendered_for_an_agent_of_its_own(tmp_path):
    tiers = "  tiers: [{kind: mooncake, master: '10.0.0.1:50051'}, {kind: disk, path: /nvme/kv, capacity: 1TiB}]\n"
    file = f"engine: vllm\nmodel: /m\nconnector:\n{tiers}"
    with pytest.raises(ConfigError, match=r"line 4: connector.tiers has 'disk', whose folder .*agent to external"):
        rendered(tmp_path, file, "k8s")
    assert "/nvme/kv" in str(rendered(tmp_path, f"{file}  agent: external\n", "k8s"))


@pytest.mark.parametrize("words", [["--render", "helm"], ["--render", "k8s", "--check"], ["--render"]])
def test_forms_that_do_not_exist_are_wrong_usage(tmp_path, words):
    file = tmp_path / "d.yaml"
    file.write_text("engine: vllm\nmodel: /m\n")
    assert CliRunner().invoke(app, ["up", str(file), *words]).exit_code == 2
