"""The built-in router's policy `conductor`: by its own history, and by an index that is slow, wrong or dead too."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from agent.asking import Client, prompt, store_prompt
from agent.publisher import Publisher, stored
from agent.stand_in import CAPACITY, running
from causes import forget_causes
from proxied import BODY, SGLANG, VLLM, Engine, every_way, free_port, wait_until

from mooncake_connector.deploy import index as module
from mooncake_connector.deploy.index import Index
from mooncake_connector.deploy.instances import Instance
from mooncake_connector.deploy.policies import Prompt
from store_client import EmbeddedStore

CONDUCTOR = ("--policy", "conductor")
engines = pytest.mark.parametrize("way", [VLLM, SGLANG], ids=("vllm", "sglang"))


class Conductor:
    """What an index of Mooncake's Conductor answers to `/query`; `answer` is (status, what is said)."""

    def __init__(self) -> None:
        self.questions: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.answer: tuple[int, Any] = (200, {"default": {}})
        self.goes_on = threading.Event()
        self.goes_on.set()
        conductor = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                conductor.tokens.append(self.headers["Authorization"])
                conductor.questions.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                conductor.goes_on.wait(120)
                status, said = conductor.answer
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):  # nobody waited
                    self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def says(self, **tokens: int) -> None:
        """By `host:port` of instances with _ for both marks."""
        self.answer = (200, {"default": {url: {"longest_matched": many, "GPU": many} for url, many in tokens.items()}})

    def close(self) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def conductor() -> Iterator[Conductor]:
    one = Conductor()
    yield one
    one.close()


def at(engine: Engine) -> str:
    return engine.url.removeprefix("http://")


@every_way
def test_a_prefix_goes_where_it_was_computed(proxied, way):
    proxy = proxied(*way, *CONDUCTOR)
    for number in range(6):
        if way is VLLM:
            assert proxy.ask({**BODY, "prompt": f"{'a' * 4096} {number}"})[0] == 200
        else:  # decode answers at once, and prefill is left by then
            for one in proxy.decodes:
                one.waits.clear()
            connection = proxy.open("POST", "/v1/completions", {**BODY, "prompt": f"{'a' * 4096} {number}"})
            sent = number + 1
            wait_until(
                lambda sent=sent: len(proxy.sent(proxy.prefills)) == sent == len(proxy.sent(proxy.decodes)), "both"
            )
            for one in proxy.decodes:
                one.waits.set()
            assert connection.getresponse().status == 200
            connection.close()
    assert sorted(len(one.bodies) for one in proxy.prefills) == [0, 6]
    assert all(one.bodies for one in proxy.decodes)  # who get their KV, are chosen by load


@engines
def test_instances_without_prefill_compute_what_they_are_sent(proxied, way):
    proxy = proxied(*way, *CONDUCTOR, plain=True)
    chats = [[{"role": "user", "content": letter * 4096}] for letter in "ab"]
    for body in [{**BODY, "messages": chat, "prompt": None} for chat in chats] * 4:
        assert (
            proxy.ask({key: value for key, value in body.items() if value is not None}, "/v1/chat/completions")[0]
            == 200
        )
    by_chat = [
        {one.name for one in proxy.decodes if any(body["messages"] == chat for body in one.bodies)} for chat in chats
    ]
    assert [len(names) for names in by_chat] == [1, 1] and by_chat[0] != by_chat[1]
    assert all("bootstrap_room" not in body and "kv_transfer_params" not in body for body in proxy.sent(proxy.decodes))
    proxy.decodes[0].die()
    assert [proxy.ask()[1]["by"] for _ in range(4)] == ["d1"] * 4


def test_what_was_sent_where_and_what_became_of_the_index_is_in_its_metrics(proxied, conductor):
    proxy = proxied(*VLLM, *CONDUCTOR, "--index", conductor.url, "--index-deadline-s", "60")
    conductor.says(**{at(proxy.prefills[0]): 2})
    assert [proxy.ask({**BODY, "prompt": [1, 2, 3]})[0] for _ in range(3)] == [200] * 3
    text = proxy.get("/metrics")[1].decode()
    of, name = f'{{role="prefill",url="{proxy.prefills[0].url}"}}', "mooncake_connector_router"
    for line in (
        f"{name}_requests_total{of} 3.0", f"{name}_prompt_tokens_total{of} 9.0", f"{name}_cached_tokens_total{of} 6.0",
        f"{name}_running_requests{of} 0.0", f"{name}_prefill_tokens{of} 0.0",
        f'{name}_index_questions_total{{outcome="answered"}} 3.0',
    ):  # fmt: skip
        assert line in text.splitlines()
    decoded = [line.split() for line in text.splitlines() if line.startswith(f'{name}_requests_total{{role="decode"')]
    assert sum(float(count) for _, count in decoded) == 3


def test_a_client_that_floods_one_prefix_gets_more_than_one_instance(proxied):
    proxy = proxied(*VLLM, *CONDUCTOR, plain=True)
    for one in proxy.decodes:
        one.waits.clear()
    held = [proxy.open("POST", "/v1/completions", {**BODY, "prompt": "a" * 65536}) for _ in range(48)]
    wait_until(lambda: len(proxy.sent(proxy.decodes)) == 48, "all requests")
    assert min(len(one.bodies) for one in proxy.decodes) >= 7
    for one in proxy.decodes:
        one.waits.set()
    assert {connection.getresponse().status for connection in held} == {200}
    for connection in held:
        connection.close()


def test_a_long_conversation_outlives_all_instances_and_clients_are_told_meanwhile(proxied):
    proxy = proxied(*VLLM, *CONDUCTOR, plain=True)
    long = {**BODY, "prompt": [7] * 100_000}
    (began,) = {proxy.ask(long)[1]["by"] for _ in range(3)}
    first, other = sorted(proxy.decodes, key=lambda one: one.name != began)
    first.healthy = other.healthy = False
    wait_until(lambda: proxy.get("/health")[0] == 503, "the proxy to say so")
    status, answer = proxy.ask(long)
    assert status == 503 and "no decode instance answers" in answer["error"]["message"]
    other.healthy = True
    wait_until(proxy.is_well, "one that is back")
    assert [proxy.ask(long)[1]["by"] for _ in range(2)] == [other.name] * 2
    first.healthy = True
    wait_until(lambda: proxy.ask(long)[1]["by"] == began, "the other that is back, which has it as well")


def test_the_index_is_asked_for_the_tokens_of_an_instance(proxied, conductor, tmp_path):
    (tmp_path / "token").write_text("as long as it has to be\n")
    (tmp_path / "token").chmod(0o600)
    proxy = proxied(
        *VLLM, *CONDUCTOR, "--index", conductor.url, "--index-block-tokens", "16", "--index-deadline-s", "60",
        "--index-token-file", str(tmp_path / "token"),
    )  # fmt: skip
    conductor.says(**{at(proxy.prefills[1]): 3, "192.0.2.1:80": 10**9})
    assert [proxy.ask({**BODY, "cache_salt": "s"})[0] for _ in range(4)] == [200] * 4
    assert [len(one.bodies) for one in proxy.prefills] == [0, 4]
    question = {"model": "m", "token_ids": [*b"a b"], "tenant_id": "default", "block_size": 16, "cache_salt": "s"}
    assert conductor.questions == [question] * 4 and set(conductor.tokens) == {"Bearer as long as it has to be"}
    assert {"model": "m", "prompt": "a b"} in [
        body for one in (*proxy.prefills, *proxy.decodes) for body in one.tokenized
    ]
    conductor.says(**{proxy.prefills[0].url: 700})  # by its whole URL, and more than there is
    assert proxy.ask({**BODY, "prompt": [7, 8, 9]})[0] == 200 and len(proxy.prefills[0].bodies) == 1
    assert conductor.questions[-1]["token_ids"] == [7, 8, 9]
    assert proxy.ask({**BODY, "prompt": ["a", "b"]})[0] == 200 and len(conductor.questions) == 5  # two prompts


@pytest.mark.parametrize("fault", ["dead", "slow", "refuses", "lies"])
def test_an_index_that_is_of_no_use_costs_no_answer(proxied, conductor, fault):
    proxy = proxied(
        *VLLM, *CONDUCTOR, "--index", f"http://127.0.0.1:{free_port()}" if fault == "dead" else conductor.url,
        "--index-deadline-s", "0.3",
    )  # fmt: skip
    if fault == "slow":
        conductor.goes_on.clear()
    conductor.answer = (
        500 if fault == "refuses" else 200,
        {"default": {at(proxy.prefills[0]): {"longest_matched": "all"}}},
    )
    assert [proxy.ask()[0] for _ in range(8)] == [200] * 8
    assert [len(one.bodies) for one in proxy.prefills] == [4, 4]  # by load, which is the same


def found(work: Callable[[Index, list[Instance]], Awaitable[Any]], url: str, deadline_s: float = 60.0) -> Any:
    """What comes of `work` with an index and two instances, of which nobody is asked."""

    async def run() -> Any:
        async with httpx.AsyncClient(trust_env=False) as client:
            index = Index(url, block_tokens=64, deadline_s=deadline_s, token=b"", client=client)
            return await work(
                index, [Instance("http://127.0.0.1:1", failures=0), Instance("http://127.0.0.1:2", failures=0)]
            )

    return asyncio.run(run())


@pytest.mark.parametrize(
    "status, said, cause",
    [
        (503, {}, "index_refused"),
        (200, b"{", "index_wrong"),
        (200, [], "index_wrong"),
        (200, {"default": []}, "index_wrong"),
        (200, {"default": {"127.0.0.1:2": {"longest_matched": -1}}}, "index_wrong"),
        (200, {"default": {"127.0.0.1:2": {"longest_matched": True}}}, "index_wrong"),
        (200, {"default": {"127.0.0.1:2": 5}}, "index_wrong"),
        (200, b"[" * 200_000, "index_wrong"),
        (200, b" " * (17 << 20), "index_wrong"),
    ],
)
def test_every_wrong_answer_has_a_cause_that_is_counted_and_logged_once(
    conductor, monkeypatch, caplog, status, said, cause
):
    monkeypatch.setattr(module, "_PAUSE_S", 1e9)
    conductor.answer = (status, said)

    async def work(index: Index, among: list[Instance]) -> Any:
        with caplog.at_level(logging.WARNING):
            prompts = [await index.find({"model": "m", "prompt": [1, 2, 3]}, {}, among) for _ in range(5)]
        index._not_before_s = 0.0
        conductor.answer = (200, {"default": {"127.0.0.1:2": {"longest_matched": 2}}, "other": 5})
        return [*prompts, await index.find({"model": "m", "prompt": [1, 2, 3]}, {}, among)], index

    (*without, last), index = found(work, conductor.url)
    assert without == [Prompt(3)] * 5 and last == Prompt(3, {"http://127.0.0.1:2": 2})
    assert index.outcomes == {cause: 3, "unasked": 2, "answered": 1} and len(conductor.questions) == 4
    assert len(caplog.records) == 1 and "requests go by load alone" in caplog.text


def test_what_no_instance_tokenizes_says_nothing_about_the_index(conductor):
    """A client may send anything; the index is asked for the next one's."""

    async def work(index: Index, among: list[Instance]) -> Any:
        prompts = [await index.find({"model": "m", "prompt": "abcdefgh"}, {}, among) for _ in range(4)]
        conductor.answer = (413, {})
        prompts += [await index.find({"model": "m", "prompt": [1]}, {}, among) for _ in range(4)]
        conductor.answer = (200, {"default": {}})
        await index.find({"prompt": [1]}, {}, among)
        await index.find({"model": ["m"], "prompt": [1]}, {}, among)
        return [*prompts, await index.find({"model": "m", "prompt": [1]}, {}, among)], index.outcomes

    prompts, outcomes = found(work, conductor.url)
    assert prompts == [Prompt(2)] * 4 + [Prompt(1)] * 5
    assert outcomes == {"tokenize_unreachable": 4, "index_refused": 4, "nothing_to_ask": 2, "answered": 1}


def test_an_instance_that_never_tokenizes_costs_the_deadline_and_no_more(conductor):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_one = Instance(f"http://127.0.0.1:{silent.getsockname()[1]}", failures=0)

        async def work(index: Index, among: list[Instance]) -> Any:
            body = {"model": "m", "prompt": "abcdefgh"}
            return [await index.find(body, {}, [silent_one]) for _ in range(4)], index.outcomes

        assert found(work, conductor.url, deadline_s=0.1) == ([Prompt(2)] * 4, {"tokenize_late": 4})


def test_the_agents_index_knows_who_reads_the_pool(proxied, pool):
    """The one that comes with this package; an instance of another host does not read it."""
    tokens, client = prompt(1, 300), Client(free_port())
    with running(pool, None, tiers=[], agent_http_port=client.port), EmbeddedStore(pool, CAPACITY) as store:
        store_prompt(store, tokens)
        index = ("--index", f"http://127.0.0.1:{client.port}", "--index-deadline-s", "60")
        proxy = proxied(*VLLM, *CONDUCTOR, *index)
        wait_until(lambda: reached(client), "the index")
        elsewhere, here = proxy.prefills
        client.register(at(elsewhere), endpoint="tcp://192.0.2.1:5557")
        client.register(here.url)
        assert [proxy.ask({**BODY, "prompt": tokens})[0] for _ in range(4)] == [200] * 4
        assert [len(one.bodies) for one in proxy.prefills] == [0, 4]
    assert proxy.ask({**BODY, "prompt": tokens})[0] == 200  # without it


def test_instances_that_publish_events_are_registered_and_again_where_the_index_is_a_new_one(proxied, pool):
    tokens, client, engine = prompt(1, 64), Client(free_port()), Engine("m")
    often = "from mooncake_connector.deploy import index; index._REGISTER_EVERY_S = 0.1"
    with Publisher() as publisher:
        publisher.publish(stored([b"a"], tokens, size=64))
        proxied(
            *SGLANG, *CONDUCTOR, "--index", f"http://127.0.0.1:{client.port}", "--events",
            ",".join((engine.url, "3", *publisher.endpoints.values())), before=often,
        )  # fmt: skip
        for _ in range(2):
            with running(pool, None, tiers=[], agent_http_port=client.port):
                wait_until(lambda: reached(client), "the index")
                wait_until(lambda: client.query(tokens)["default"].get(engine.url, {}).get("GPU") == 64, "its events")
                (service,) = client.ask("GET", "/services").json["services"]
            assert (service["modelname"], service["dp_rank"]) == ("m", 3)
            assert service["endpoint"] == publisher.endpoints["endpoint"]
    engine.die()


def test_what_a_former_deployment_registered_is_replaced_and_what_a_person_registered_stays(proxied, pool):
    """The agent lives on for minutes, and knows ports at which nobody publishes any more."""
    client, engines = Client(free_port()), [Engine("m"), Engine("m")]
    ours, persons = (engine.url for engine in engines)
    often = "from mooncake_connector.deploy import index; index._REGISTER_EVERY_S = 0.1"

    def known() -> dict[str, str]:
        return {one["instance_id"]: one["endpoint"] for one in client.ask("GET", "/services").json["services"]}

    with running(pool, None, tiers=[], agent_http_port=client.port):
        wait_until(lambda: reached(client), "the index")
        client.register(ours, type="SGLang", endpoint="tcp://127.0.0.1:1")
        client.register(persons, type="SGLang", pool=True)
        events = [f"{url},0,tcp://127.0.0.1:{port}" for url, port in ((ours, 2), (persons, 3))]
        proxied(
            *SGLANG, *CONDUCTOR, "--index", f"http://127.0.0.1:{client.port}", "--events", events[0], "--events",
            events[1], before=often,
        )  # fmt: skip
        for _ in range(2):  # once more, so that the other one has had its turn in between
            wait_until(lambda: known() == {ours: "tcp://127.0.0.1:2", persons: ""}, "the new port")
            client.post("/unregister", instance_id=ours)
    for engine in engines:
        engine.die()


def registered(answer: Callable[[httpx.Request], Any], urls: list[str], rounds: int) -> list[str]:
    """What is asked while instances are registered again and again with an index that answers so."""
    asked = list[str]()

    def note(request: httpx.Request) -> Any:
        asked.append(str(request.url))
        return answer(request)

    async def register() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(note)) as client:
            index = Index("http://index:1", block_tokens=64, deadline_s=60.0, token=b"", client=client)
            publishing = [(url, "0", "tcp://127.0.0.1:5557") for url in urls]
            registering = asyncio.create_task(index.keep_registered("vLLM", publishing))
            while len([url for url in asked if url.endswith("/v1/models")]) < rounds * len(urls):
                await asyncio.sleep(0)
            registering.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_REGISTER_EVERY_S", 0.0)
        patch.setattr(module, "_REGISTER_S", 600.0)
        forget_causes()
        asyncio.run(asyncio.wait_for(register(), 60))
    return asked


def test_instances_that_do_not_say_their_models_name_are_each_told_of_once(caplog):
    asked = registered(lambda request: httpx.Response(401), ["http://one:1", "http://two:2"], rounds=3)
    assert set(asked) == {"http://one:1/v1/models", "http://two:2/v1/models"}
    said = [message for message in caplog.messages if "it has an API key" in message]
    assert [message.partition(" is not registered")[0] for message in said] == ["http://one:1", "http://two:2"]


def test_what_another_deployment_calls_the_same_is_replaced_once_and_not_in_turns(caplog):
    other = {"instance_id": "http://one:1", "dp_rank": 0, "tenant_id": "default", "endpoint": "tcp://10.0.0.2:5557"}

    def answer(request: httpx.Request) -> httpx.Response:
        said = {"/v1/models": {"data": [{"id": "m"}]}, "/services": {"services": [other]}}
        refused = request.url.path == "/register"
        return httpx.Response(409 if refused else 200, json=said.get(request.url.path, {}))

    asked = registered(answer, ["http://one:1"], rounds=4)
    assert asked.count("http://index:1/unregister") == 1 and asked.count("http://index:1/register") >= 4
    assert "http://one:1 is not registered" in caplog.text and "/register answered 409" in caplog.text


def test_a_replacement_that_the_index_refused_is_tried_again():
    former = {"instance_id": "http://one:1", "dp_rank": 0, "tenant_id": "default", "endpoint": "tcp://10.0.0.2:5557"}
    unregistered = iter((503, 200))
    known = [former]

    def answer(request: httpx.Request) -> httpx.Response:
        said = {"/v1/models": {"data": [{"id": "m"}]}, "/services": {"services": list(known)}}
        status = 409 if request.url.path == "/register" and known else 200
        if request.url.path == "/unregister" and (status := next(unregistered)) == 200:
            known.clear()
        return httpx.Response(status, json=said.get(request.url.path, {}))

    asked = registered(answer, ["http://one:1"], rounds=4)
    assert not known and asked.count("http://index:1/unregister") == 2


def test_an_instance_that_hangs_holds_up_no_other():
    async def never() -> None:
        await asyncio.Event().wait()

    def answer(request: httpx.Request) -> Any:
        return never() if request.url.host == "silent" else httpx.Response(200, json={"data": [{"id": "m"}]})

    asked = registered(answer, ["http://silent:1", "http://one:1"], rounds=3)
    assert asked.count("http://index:1/register") >= 3


def reached(client: Client) -> bool:
    with contextlib.suppress(OSError):
        return client.ask("GET", "/health").status == 200
    return False


def test_an_index_that_does_not_answer_in_time_is_left(conductor, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 1e9)
    conductor.goes_on.clear()

    async def work(index: Index, among: list[Instance]) -> Any:
        return [await index.find({"model": "m", "prompt": [1]}, {}, among) for _ in range(5)], index.outcomes

    prompts, outcomes = found(work, conductor.url, deadline_s=0.1)
    assert prompts == [Prompt(1)] * 5 and outcomes == {"index_late": 3, "unasked": 2}
