"""What Kubernetes is given for a pod: addresses, secrets, memory, probes, devices, models, and who waits for whom."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from ground.rendering import HIDDEN, env_of, pods, rendered

from mooncake_connector.config.secret import read_secret
from mooncake_connector.config.sources import load_config


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
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert wait("30", url).returncode == 0
        silent = wait("0", url, f"{url}/other")
        assert silent.returncode == 1 and silent.stderr == f"no answer from {url}/other within 0 s\n"
        server.shutdown()
