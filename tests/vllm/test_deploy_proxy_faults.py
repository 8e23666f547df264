"""The built-in router where an instance refuses, says nothing, or is asked what it cannot be asked."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from proxied import BODY, SGLANG, VLLM, wait_until

from mooncake_connector.deploy import fleet
from mooncake_connector.deploy.asgi import Answered
from mooncake_connector.deploy.fleet import NoAnswer, look, unless_lost
from mooncake_connector.deploy.instances import Group, Instance
from mooncake_connector.deploy.policies import RoundRobin
from mooncake_connector.deploy.relay import Proxy, Request


@pytest.mark.parametrize("way", [VLLM, SGLANG], ids=("sequential", "sglang"))
def test_a_stream_that_has_only_headers_has_not_begun(proxied, way):
    """It may queue for longer than an answer may be silent, and another instance may be asked for it."""
    proxy = proxied(*way, "--silence-deadline-s", "0.2")
    for one in proxy.decodes:
        one.queues, one.breaks = True, True
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", {**BODY, "stream": True})
    wait_until(lambda: len(proxy.sent(proxy.decodes)) == 1, "the request at decode")
    first, other = sorted(proxy.decodes, key=lambda one: not one.bodies)
    looks = first.looks
    wait_until(lambda: first.looks > looks + 5, "looks")
    assert first.left == 0
    other.breaks = False
    for one in proxy.decodes:
        one.waits.set()
    assert connection.getresponse().read() == f"data: {other.name}\n\n".encode()
    connection.close()


def test_sglang_clients_are_told_why(proxied):
    """Where nobody is left, what the last one answered."""
    proxy = proxied(*SGLANG)
    for one in proxy.decodes:
        one.waits.clear()  # as they do without a prefill
    for one in proxy.prefills:
        one.status = 500
    status, answer = proxy.ask()
    assert status == 500 and answer["by"] in ("p0", "p1")
    for one in proxy.prefills:
        one.status = 200
        one.waits.clear()
    for one in proxy.decodes:
        one.status = 503
        one.waits.set()
    status, answer = proxy.ask()
    assert status == 503 and answer["by"] in ("d0", "d1")
    # Decode refuses while prefill computes, and nobody tells it.
    before = [rid for one in proxy.prefills for rid in one.aborted]
    for one in proxy.decodes:
        one.status = 400
    assert proxy.ask()[0] == 400
    wait_until(lambda: sum(len(one.aborted) for one in proxy.prefills) == len(before) + 1, "an abort at prefill")


def test_an_answer_that_takes_too_long_is_not_asked_for_again(proxied):
    proxy = proxied(*VLLM, before="from mooncake_connector.deploy import proxy; proxy.ANSWER_LIMIT_S = 1.0; ")
    for one in proxy.decodes:
        one.waits.clear()
    status, answer = proxy.ask({**BODY, "prompt": ["a", "b"]})  # decode alone is asked
    assert status == 504 and "in time" in answer["error"]["message"]
    assert len(proxy.sent(proxy.decodes)) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [(httpx.LocalProtocolError("no header"), 400), (httpx.ReadTimeout("late"), 504), (httpx.ReadError("gone"), 0)],
)
def test_an_instance_answers_for_what_it_does_itself(error, status):
    one = Instance("http://x", failures=0)

    async def fails() -> None:
        raise error

    with pytest.raises(Answered if status else NoAnswer) as caught:
        asyncio.run(unless_lost(one, fails(), lambda: ""))
    assert getattr(caught.value, "status", 0) == status and one.failures == (not status)


def test_a_client_that_leaves_as_an_answer_comes_leaves_nothing_open():
    closed = []

    class Answer:
        status_code, headers = 200, httpx.Headers()

        async def aiter_raw(self) -> Any:
            await asyncio.Event().wait()
            yield b""

        async def aclose(self) -> None:
            closed.append(self)

    class Client:
        asked, answers = asyncio.Event(), asyncio.Event()

        def build_request(self, *arguments: Any, **more: Any) -> None:
            pass

        async def send(self, request: None, *, stream: bool) -> Answer:
            self.asked.set()
            await self.answers.wait()
            return Answer()

    async def leave() -> None:
        client, decode = Client(), Instance("http://x", failures=0)
        group = Group([decode], RoundRobin())
        proxy = Proxy("vllm", group, group, concurrent=False, silence_s=60.0, client=client)
        asking = asyncio.create_task(proxy._decoded(Request("/", {}, {}, None), {}))
        await client.asked.wait()
        client.answers.set()
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))

    asyncio.run(leave())
    assert len(closed) == 1


def test_instances_are_looked_at_whatever_comes_of_it(monkeypatch):
    monkeypatch.setattr(fleet, "HEALTH_EVERY_S", 0.0)
    asked = []

    class Client:
        async def get(self, url: str, **more: Any) -> Any:
            asked.append(url)
            if len(asked) > 9:
                raise asyncio.CancelledError
            if "bad" in url:
                raise httpx.InvalidURL("bad")
            return httpx.Response(200)

    good, bad = Instance("http://good"), Instance("http://bad")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(look(Client(), (bad, good)))
    assert good.healthy and not bad.healthy
