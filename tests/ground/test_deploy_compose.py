"""What Compose is given: ports, the model's folder, how services start and stop."""

from __future__ import annotations

import yaml
from ground.rendering import rendered


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
