"""A deployment as files for Compose and Kubernetes: valid, with the commands of `up`, complete, and without secrets.

The Compose Specification's schema comes with check-jsonschema, Kubernetes' come with kubernetes-validate.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.config.schema import load_config
from mooncake_connector.config.secret import read_secret
from mooncake_connector.deploy.commands import commands
from mooncake_connector.deploy.file import read_deployment
from mooncake_connector.deploy.render import compose, kubernetes
from mooncake_connector.errors import ConfigError

FORMS = {"compose": compose.render, "k8s": kubernetes.render, "rbg": kubernetes.render_group}
KUBERNETES = "v1.37.0-local-strict"
COMPOSE = jsonschema.Draft202012Validator(
    json.loads((files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json").read_text())
)
HIDDEN = "hunter2"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cc", "Cs"]), max_size=20)

GROUP_ROLE = {
    "type": "object",
    "required": ["name", "replicas", "standalonePattern"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "replicas": {"type": "integer", "minimum": 0},
        "annotations": {
            "additionalProperties": False,
            "properties": {
                "rbg.workloads.x-k8s.io/role-workload-type": {"enum": ["apps/v1/StatefulSet", "apps/v1/Deployment"]}
            },
        },
        "dependencies": {"type": "array", "items": {"type": "string"}},
        "standalonePattern": {"required": ["template"], "additionalProperties": False, "properties": {"template": {}}},
    },
}
"""Of RoleBasedGroup's CRD, workloads.x-k8s.io/v1alpha2 as of v0.8.0-alpha.5, the fields that are used here."""


@st.composite
def instances(draw, first_port: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "count": draw(st.integers(1, 3)),
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
        "prefill": draw(instances(9100)),
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


def rendered(tmp: Path, content: dict[str, Any] | str, form: str) -> str:
    file = tmp / "d.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True))
    return FORMS[form](read_deployment(file, for_containers=True), file, "1.2.3")


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def pods(text: str) -> dict[str, dict[str, Any]]:
    """By role: {"replicas", "metadata", "spec"}, of plain objects or of a group."""
    found = {}
    for one in documents(text):
        if one["kind"] == "RoleBasedGroup":
            for role in one["spec"]["roles"]:
                found[role["name"]] = {"replicas": role["replicas"], **role["standalonePattern"]["template"]}
        elif one["kind"] in ("StatefulSet", "Deployment"):
            role = one["metadata"]["labels"]["app.kubernetes.io/component"]
            found[role] = {"replicas": one["spec"]["replicas"], **one["spec"]["template"]}
    return found


def expanded(word: str) -> str:
    """As Kubernetes and Compose read it, references left as they are."""
    return word.replace("$$", "$")


def validator(one: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Of Kubernetes' own schema for such an object, where fields that it does not know are errors."""
    return validator_of(one["kind"].lower(), one["apiVersion"].replace("/", "-"))


@functools.cache
def validator_of(kind: str, version: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema(f"{kind}-{version}"), registry=definitions())


@functools.cache
def definitions() -> referencing.Registry:
    return referencing.Resource.from_contents(schema("_definitions")) @ referencing.Registry()


def schema(name: str) -> dict[str, Any]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES
    return json.loads((folder / f"{name}.json").read_text())


def check_valid(text: str, form: str) -> None:
    if form == "compose":
        assert [error.message for error in COMPOSE.iter_errors(yaml.safe_load(text))] == []
        return
    for one in documents(text):
        if one["kind"] != "RoleBasedGroup":
            validator(one).validate(one)
            continue
        assert one["apiVersion"] == "workloads.x-k8s.io/v1alpha2" and set(one["spec"]) == {"roles"}
        for role in one["spec"]["roles"]:
            jsonschema.validate(role, GROUP_ROLE)
            assert set(role["standalonePattern"]["template"]) <= {"metadata", "spec"}
            template = {**role["standalonePattern"], "apiVersion": "v1", "kind": "PodTemplate"}
            validator(template).validate(template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("deployment")


@pytest.mark.parametrize("form", FORMS)
@given(content=deployments())
@settings(max_examples=12)
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
@settings(max_examples=12)
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
@settings(max_examples=12)
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


def env_of(pod: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod["spec"]["containers"][0]["env"]}


def test_pods_hand_over_at_their_own_addresses_with_a_secret(tmp_path):
    """What a pod gets is a configuration that stands, once Kubernetes has filled in its address."""
    text = rendered(tmp_path, f"engine: vllm\nmodel: /m\nconnector: {{secret_file: {tmp_path}/s}}", "k8s")
    pod = pods(text)["prefill"]
    env = env_of(pod)
    assert env["MOONCAKE_CONNECTOR_TRANSFER_HOSTS"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in pod["spec"]["containers"][0]["volumeMounts"]}
    path = Path(env["MOONCAKE_CONNECTOR_SECRET_FILE"])
    secret = mounts[str(path.parent)]["secret"]
    assert secret["secretName"] == "llm" and secret["items"] == [{"key": "secret", "path": path.name}]
    assert f"kubectl create secret generic llm --from-file=secret={tmp_path}/s\n" in text
    # Kubernetes makes such a file a link to one of root's with this mode.
    (tmp_path / "data").write_bytes(b"x" * 32)
    (tmp_path / "data").chmod(secret["defaultMode"])
    (tmp_path / "link").symlink_to("data")
    assert read_secret(tmp_path / "link") == b"x" * 32
    here = {"MOONCAKE_CONNECTOR_TRANSFER_HOSTS": "10.0.0.7", "MOONCAKE_CONNECTOR_SECRET_FILE": str(tmp_path / "link")}
    config = load_config(None, {**env, **here})
    assert config.transports == ("tcp",) and config.transfer_hosts == ("10.0.0.7",)


@pytest.mark.parametrize(
    "connector, mib",
    [
        ("{capacity: 8GiB}", 8 * 1024 * 1.02 + 2048),
        ("{}", 4 * 1024 * 1.02 + 2048),
        ("{capacity: null}", 4 * 1024 * 1.02 + 2048),
        ("{prefix_reuse: false}", 2048),
    ],
)
def test_shared_memory_holds_the_pool_and_what_engines_need(tmp_path, connector, mib):
    content = f"engine: vllm\nmodel: /m\nconnector: {connector}\nprefill: {{count: 2}}"
    volumes = pods(rendered(tmp_path, content, "k8s"))["decode"]["spec"]["volumes"]
    shm = next(one["emptyDir"] for one in volumes if one["name"] == "shm")
    assert shm["medium"] == "Memory" and abs(int(shm["sizeLimit"].removesuffix("Mi")) - mib) < 1
    services = yaml.safe_load(rendered(tmp_path, content, "compose"))["services"]
    pod, env = services["pod"], services["decode-0"].get("environment", {})
    assert load_config(None, env).capacity == (None if mib == 2048 else (8 if "8GiB" in connector else 4) << 30)
    assert int(pod["shm_size"].removesuffix("m")) == int(shm["sizeLimit"].removesuffix("Mi")) + 2 * 2048


def test_probes_give_an_instance_the_time_that_the_file_gives(tmp_path):
    found = pods(rendered(tmp_path, "engine: sglang\nmodel: /m\nstart_deadline_s: 61\nsilence_deadline_s: 41", "k8s"))
    container = found["decode"]["spec"]["containers"][0]
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 65
    assert {container[one]["httpGet"]["path"] for one in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "/health"
    }
    assert container["livenessProbe"]["failureThreshold"] * container["livenessProbe"]["periodSeconds"] == 60
    router = found["router"]["spec"]["containers"][0]
    assert router["readinessProbe"]["httpGet"]["path"] == "/health" and "tcpSocket" in router["livenessProbe"]


def test_an_sglang_router_is_asked_whether_it_has_taken_its_instances_in(tmp_path):
    found = pods(rendered(tmp_path, "engine: sglang\nmodel: /m\nrouter: {kind: sglang-router}", "k8s"))
    router = found["router"]["spec"]["containers"][0]
    assert router["readinessProbe"]["httpGet"]["path"] == "/readiness" and "tcpSocket" in router["livenessProbe"]


def test_a_pod_has_a_gpu_for_each_rank(tmp_path):
    found = pods(rendered(tmp_path, "engine: vllm\nmodel: /m\nprefill: {tp: 2, pp: 3}", "k8s"))
    limits = [found[role]["spec"]["containers"][0]["resources"]["limits"] for role in ("prefill", "decode")]
    assert limits == [{"nvidia.com/gpu": "6"}, {"nvidia.com/gpu": "1"}]


def test_models_come_from_the_node_a_claim_or_the_hub(tmp_path):
    def model(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
        spec = pods(rendered(tmp_path, f"engine: vllm\n{text}", "k8s"))["prefill"]["spec"]
        mount = next(one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "model")
        return mount, next(one for one in spec["volumes"] if one["name"] == "model")

    mount, volume = model("model: ./m")
    assert mount["mountPath"] == volume["hostPath"]["path"] == str(tmp_path / "m") and mount["readOnly"]
    mount, volume = model("model: /models/m\nrender: {claim: models}")
    assert (mount["mountPath"], mount["subPath"]) == ("/models/m", "m")
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    mount, volume = model("model: ../models/m/.")
    assert mount["mountPath"] == volume["hostPath"]["path"] == str(tmp_path.parent / "models" / "m")
    mount, _ = model("model: ..\nrender: {claim: models}")
    assert (mount["mountPath"], mount["subPath"]) == (str(tmp_path.parent), tmp_path.parent.name)
    mount, volume = model("model: owner/m")
    assert volume["emptyDir"] == {} and "readOnly" not in mount
    decode = pods(rendered(tmp_path, "engine: vllm\nmodel: owner/m", "k8s"))["decode"]
    assert env_of(decode)["HF_HOME"] == mount["mountPath"]


def test_secrets_are_named_where_they_have_to_be_given(tmp_path):
    content = f"engine: sglang\nmodel: /m\nflags: --api-key {HIDDEN}\nenv: {{HF_TOKEN: {HIDDEN}, PAGE_TOKENS: 64}}"
    text = rendered(tmp_path, content, "k8s")
    assert "--from-literal=API_KEY=... --from-literal=HF_TOKEN=...\n" in text
    env = env_of(pods(text)["decode"])
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "llm", "key": "HF_TOKEN"}} and env["PAGE_TOKENS"] == "64"
    words = pods(text)["decode"]["spec"]["containers"][0]["command"]
    assert words[words.index("--api-key") + 1] == "$(API_KEY)"
    text = rendered(tmp_path, content, "compose")
    assert "# Set API_KEY, HF_TOKEN in the environment" in text
    assert "--api-key\n    - '${API_KEY:?}'\n" in text and "HF_TOKEN: '${HF_TOKEN:?}'" in text


def test_secrets_of_one_name_and_one_value_are_one(tmp_path):
    content = """\
engine: sglang
model: /m
env: {HF_TOKEN: a}
prefill: {count: 2, flags: --api-key one}
decode: {flags: --api-key two, env: {HF_TOKEN: b}}
router: {kind: sglang-router, flags: --api-key three}
"""
    found = pods(text := rendered(tmp_path, content, "k8s"))
    keys = "API_KEY API_KEY_DECODE API_KEY_ROUTER HF_TOKEN HF_TOKEN_DECODE"
    assert " ".join(f"--from-literal={one}=..." for one in keys.split()) in text
    assert env_of(found["decode"])["HF_TOKEN"] == {"secretKeyRef": {"name": "llm", "key": "HF_TOKEN_DECODE"}}
    assert "$(API_KEY_ROUTER)" in found["router"]["spec"]["containers"][0]["command"]
    services = yaml.safe_load(rendered(tmp_path, content, "compose"))["services"]
    assert services["decode-0"]["environment"]["HF_TOKEN"] == "${HF_TOKEN_DECODE:?}"
    assert services["prefill-0"]["entrypoint"][-1] == services["prefill-1"]["entrypoint"][-1] == "${API_KEY:?}"


def test_yaml_of_every_reader_has_the_same_texts(tmp_path):
    """1e3, 08 and y are numbers and a truth to some readers of YAML, unless they are quoted."""
    content = "engine: vllm\nmodel: /m\nenv: {A: '1e3', B: '08', C: 'y', D: 'null', E: '', F: 'a: b'}"
    text = rendered(tmp_path, content, "k8s")
    for value in ("'1e3'", "'08'", "'y'", "'null'", "''", "'a: b'"):
        assert f"value: {value}\n" in text


@pytest.mark.parametrize("kind, waits", [("builtin", False), ("vllm-router", True)])
def test_a_router_that_gives_up_starts_when_all_answer(tmp_path, kind, waits):
    text = rendered(tmp_path, f"engine: vllm\nmodel: /m\nrouter: {{kind: {kind}}}", "k8s")
    spec = pods(text)["router"]["spec"]
    assert ("initContainers" in spec) is waits
    if waits:
        urls = ["http://llm-prefill-0.llm-prefill:8100", "http://llm-decode-0.llm-decode:8200"]
        assert spec["initContainers"][0]["command"][3:] == ["900", *urls]
        assert f" {kind}\n" in text.partition("---")[0]  # it is installed into the image


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_waiting_ends_when_all_answer_or_at_the_limit():
    def wait(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mooncake_connector.deploy.watch", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert wait("30", url).returncode == 0
        silent = wait("0", url, f"{url}/other")
        assert silent.returncode == 1 and silent.stderr == f"no answer from {url}/other within 0 s\n"
        server.shutdown()


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


def test_compose_opens_what_up_opens_at_the_addresses_of_the_file(tmp_path):
    content = (
        "engine: sglang\nmodel: /m\nhost: 0.0.0.0\nprefill: {count: 2}\nrouter: {kind: sglang-router, host: '::1'}"
    )
    services = yaml.safe_load(rendered(tmp_path, content, "compose"))["services"]
    instances = [f"0.0.0.0:{port}:{port}" for port in (8100, 8101, 8200)]
    assert services["pod"]["ports"] == [*instances, "[::1]:8000:8000", "[::1]:29000:29000"]
    words = services["router"]["entrypoint"]
    assert words[words.index("--host") + 1] == words[words.index("--prometheus-host") + 1] == "::"
    alike = ("network_mode", "ipc", "pid")
    assert {one[key] for name, one in services.items() if name != "pod" for key in alike} == {"service:pod"}


def test_compose_reads_the_folder_of_the_model_as_it_is_called(tmp_path):
    service = yaml.safe_load(rendered(tmp_path, "engine: vllm\nmodel: /a$b/m", "compose"))["services"]["decode-0"]
    bound, words = service["volumes"][0], service["entrypoint"]
    assert bound["source"] == bound["target"] == words[words.index("--model") + 1] == "/a$$b/m"


def test_compose_stops_and_starts_as_up_does_and_says_what_it_does_not_do(tmp_path):
    text = rendered(tmp_path, "engine: vllm\nmodel: /m", "compose")
    services = yaml.safe_load(text)["services"]
    assert {name: one.get("stop_grace_period") for name, one in services.items()} == {
        "pod": None, "prefill-0": "20s", "decode-0": "20s", "router": "20s"
    }  # fmt: skip
    head = text.partition("name:")[0]
    assert "checked by a schema, run on no Docker yet" in head
    assert "after a reboot" in head and "docker compose up -d" in head and "unhealthy" in head


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
