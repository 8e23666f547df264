"""`vllm-router`'s policy `kv_aware` sends a prompt where the connector's events say that its pages are."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cases import PROMPT, Start
from simulated.waiting import wait_for
from vllm.distributed.kv_events import ZmqEventPublisher

ROUTER = Path(__file__).resolve().parents[2] / ".venvs" / "routers" / "bin" / "vllm-router"

pytestmark = pytest.mark.skipif(
    not ROUTER.exists(), reason="NOT TESTED: vllm-router could not be installed (`make routers`)"
)


class Worker(ThreadingHTTPServer):
    """Stands where a vLLM would, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked = 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: Worker

    def do_GET(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        self._send({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})

    def log_message(self, *said: object) -> None:
        pass

    def _send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Routed:
    """Two stand-ins behind the router, which hears what a publisher says of each."""

    def __init__(self, stack: ExitStack, log: Path) -> None:
        self.workers = [stack.enter_context(closing(Worker())) for _ in range(2)]
        port, ports = free_port(), [free_port() for _ in self.workers]
        self.publishers = [ZmqEventPublisher(0, endpoint=f"tcp://*:{of}") for of in ports]
        for publisher in self.publishers:
            stack.callback(publisher.shutdown)
        self._url = f"http://127.0.0.1:{port}"
        command = [
            ROUTER, "--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), "--policy", "kv_aware",
            "--worker-urls", *(worker.url for worker in self.workers), "--kv-event-block-size", 16,
            "--kv-event-model", "m",
        ]  # fmt: skip
        for worker, of in zip(self.workers, ports, strict=True):
            command += ["--kv-event-source", f"{worker.url}=tcp://127.0.0.1:{of}"]
        file = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT)
        stack.callback(process.wait)
        stack.callback(process.kill)

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return log.read_text().count("kv_index subscriber for") == 2 and self._get("/health")

        wait_for(is_ready)

    def _get(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self._url + path, timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def goes_to(self, tokens: list[int]) -> int:
        """The number of the worker that such a prompt is sent to."""
        before = [worker.asked for worker in self.workers]
        body = json.dumps({"model": "m", "prompt": tokens, "max_tokens": 1}).encode()
        asked = urllib.request.Request(self._url + "/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(asked, timeout=60).close()
        (number,) = Counter({at: worker.asked - before[at] for at, worker in enumerate(self.workers)}).elements()
        return number


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Routed]:
    with ExitStack() as stack:
        yield Routed(stack, tmp_path / "router.log")


def test_a_prompt_goes_where_the_pool_has_its_pages(start: Start, routed: Routed) -> None:
    """What vLLM says of its own cache is left out, so that what is found is the connector's."""
    engine, other = start(events=True), list(range(300, 300 + len(PROMPT)))
    for publisher, prompt in zip(routed.publishers, (other, PROMPT), strict=True):
        engine.scheduler.kv_event_publisher = OfThePool(publisher)
        engine.ask(prompt)
    for number, prompt in enumerate((other, PROMPT)):
        wait_for(lambda number=number, prompt=prompt: routed.goes_to(prompt) == number)
    for last in range(6):
        assert (routed.goes_to([*PROMPT, last]), routed.goes_to([*other, last])) == (1, 0)


class OfThePool:
    def __init__(self, publisher: ZmqEventPublisher) -> None:
        self._publisher = publisher

    def publish(self, batch: Any) -> None:
        batch.events = [event for event in batch.events if getattr(event, "medium", None) == "CPU"]
        self._publisher.publish(batch)

    def shutdown(self) -> None:
        pass
