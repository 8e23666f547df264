"""`mooncake-connector up` with the policy `conductor`: conversations go where their prefix is, and outlive that."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from agent.asking import Client
from long_form import LONG

from e2e.client import HttpClient
from e2e.demo import chat, stored_pages
from e2e.deploy.deployments import LIMIT_S, Deployed, Request, Way, row_of_ports, wait_until
from e2e.deploy.test_up import REQUESTS
from e2e.index import answers
from e2e.process import free_port, pool_folder
from store_client.agent.visit import ask_report

pytestmark = [pytest.mark.long, pytest.mark.skipif(not LONG, reason="a pair of instances of its own")]
ENDED = "vllm:request_success_total"
QUESTIONS = "mooncake_connector_router_index_questions_total"
BLOCK_TOKENS = 128
PAGES = 4
"""Of each first turn."""


@dataclass(frozen=True, slots=True)
class Conducted(Way):
    """Two instances with a prefix cache each; with an index they have a pool as well, whose agent it is."""

    pool: Path | None = None
    index: Client | None = None
    first_port: int = 0
    """Of those at which all instances publish events, and replay them."""

    def file(self, ports: dict[str, int], logs: Path) -> str:
        text = Way.file(self, ports, logs).replace(" --no-enable-prefix-caching", f" --block-size {BLOCK_TOKENS}")
        if self.index is None:
            return text
        settings = f"  pool: {self.pool}\n  capacity: 1GiB\n  agent_http_port: {self.index.port}\n"
        dotted = "".join(f" --kv-events-config.{name} {value}" for name, value in self.events.items())
        return text.replace("  prefix_reuse: false\n", settings).replace("flags:", f"flags:{dotted}")

    @property
    def events(self) -> dict[str, str]:
        """What makes all instances publish; the second one is given ports of its own."""
        ports = (f"tcp://*:{port}" for port in (self.first_port, self.first_port + 2))
        return dict(zip(("enable_kv_cache_events", "endpoint", "replay_endpoint"), ("true", *ports), strict=True))


class Instances(Deployed):
    """A deployment whose instances are looked at one by one."""

    way: Conducted

    def start(self) -> None:
        super().start()
        ports = [self.ports["decode"] + number for number in range(self.way.num_decodes)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.instances = [HttpClient("127.0.0.1", port) for port in ports]

    def ended(self) -> list[float]:
        """Requests that each has answered."""
        return [one.metric(ENDED) for one in self.instances]

    def hits(self) -> list[float]:
        """Tokens that each has found in its own cache."""
        return [one.metric("vllm:prefix_cache_hits_total") for one in self.instances]

    def ask(self, request: Request) -> tuple[str, int, float]:
        """The text, which instance gave it by its own count, and the tokens that it had."""
        ended, hits = self.ended(), self.hits()
        text = self.answer(request)
        wait_until(lambda: sum(self.ended()) == sum(ended) + 1, lambda: f"one more than {ended}", LIMIT_S)
        (number,) = [number for number, count in enumerate(self.ended()) if count > ended[number]]
        return text, number, sum(self.hits()) - sum(hits)

    def tokens(self, request: Request) -> list[int]:
        body = {key: value for key, value in request.body.items() if key in ("model", "prompt", "messages")}
        return list(json.loads(self.instances[0]._read(self.instances[0]._send("POST", "/tokenize", body)))["tokens"])

    def outcomes(self, outcome: str) -> int:
        """Questions to the index that ended so."""
        return int(self.metric(QUESTIONS, outcome=outcome))


def second(first: Request) -> Request:
    """The next turn of a conversation; what its text is, nobody knows yet."""
    body, question = first.body, "And in one word?"
    if "messages" not in body:
        return replace(first, body={**body, "prompt": f"{body['prompt']}{first.text}<|im_end|>\n{chat(question)}"})
    said = [*body["messages"], {"role": "assistant", "content": first.text}, {"role": "user", "content": question}]
    return replace(first, body={**body, "messages": said})


SECOND = [second(one) for one in REQUESTS]
ALL, TEXTS = (*REQUESTS, *SECOND), [one.text for one in REQUESTS]


@pytest.fixture
def deployed(tmp_path: Path, logs: Path) -> Iterator[Instances]:
    found = Instances(Conducted("vllm", 0, "kind: builtin, policy: conductor", 2), tmp_path, logs / "up-conductor")
    try:
        found.start()
        yield found
    finally:
        found.stop()


def test_a_conversation_stays_where_its_prefix_is_and_goes_on_elsewhere_when_that_is_killed(
    deployed: Instances,
) -> None:
    texts, began, _ = zip(*map(deployed.ask, REQUESTS), strict=True)
    assert list(texts) == TEXTS and set(began) == {0, 1}
    answers = [deployed.ask(one) for one in reversed(SECOND)]  # in turns, each would go to the other instance
    texts, went_on, hits = zip(*reversed(answers), strict=True)
    assert went_on == began and min(hits) >= 2 * BLOCK_TOKENS

    lost, left = began[0], 1 - began[0]
    before = deployed.instances[left].metric(ENDED)
    deployed.decode_server(lost).kill()
    assert [deployed.answer(one) for one in ALL] == [*TEXTS, *texts]
    wait_until(
        lambda: deployed.instances[left].metric(ENDED) == before + len(ALL), lambda: "all by the one left", LIMIT_S
    )

    deployed.wait_for(f"decode-{lost} is ready", times=2)

    def is_back() -> bool:
        """It takes turns with the other, which has everything by now: of an odd number, at what the other got last."""
        assert [deployed.answer(one) for one in (*ALL, ALL[0])] == [*TEXTS, *texts, TEXTS[0]]
        return deployed.instances[lost].metric(ENDED) > 0

    wait_until(is_back, lambda: "a request at the one that is back", LIMIT_S)


@dataclass
class Indexed:
    deployed: Instances
    index: Client
    pool: Path

    def registered(self) -> list[str]:
        return [one["instance_id"] for one in self.index.ask("GET", "/services").json["services"]]

    def wait_until_known(self, request: Request, number: int) -> None:
        """That this instance alone has what there is of the prompt in full blocks on its device."""
        tokens = self.deployed.tokens(request)
        whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS

        def holders() -> list[int]:
            answer = self.index.query(tokens, model="smollm2")["default"]
            return [at for at, url in enumerate(self.deployed.urls) if answer[url]["GPU"] == whole]

        wait_until(lambda: holders() == [number], lambda: f"{request} at {number}: {holders()}", LIMIT_S)

    def only(self, number: int) -> None:
        """From now on the index says that this instance reads the pool, and the other has nothing."""
        for other, url in enumerate(self.deployed.urls):
            self.index.ask("POST", "/unregister", {"instance_id": url, "tenant_id": "default", "dp_rank": 0})
            self.index.register(url, modelname="smollm2", pool=other == number)


@pytest.fixture
def indexed(tmp_path: Path, logs: Path) -> Iterator[Indexed]:
    index = Client(free_port())
    conductor = f"{{index: 'http://127.0.0.1:{index.port}', index_deadline_s: 10}}"
    with pool_folder() as pool:
        router = f"kind: builtin, policy: conductor, conductor: {conductor}"
        way = Conducted("vllm", 0, router, 2, pool, index, row_of_ports(4))
        found = Instances(way, tmp_path, logs / "up-conductor-index")
        try:
            found.start()
            yield Indexed(found, index, pool)
        finally:
            found.stop()


def test_conversations_go_where_the_index_says_and_by_load_where_it_says_nothing(indexed: Indexed) -> None:
    deployed = indexed.deployed
    wait_until(lambda: answers(indexed.index), lambda: "an index", LIMIT_S)
    texts, numbers, _ = zip(*map(deployed.ask, REQUESTS), strict=True)
    assert list(texts) == TEXTS
    wait_until(lambda: len(indexed.registered()) == 2, lambda: f"{indexed.registered()} in the index", LIMIT_S)
    assert set(indexed.registered()) == set(deployed.urls), "the router has registered who publishes"
    for request, number in zip(REQUESTS, numbers, strict=True):
        indexed.wait_until_known(request, number)

    wait_until(lambda: stored_pages(indexed.pool) >= len(REQUESTS) * PAGES, lambda: "pages in the pool", LIMIT_S)
    for number in (1, 0):
        indexed.only(number)
        before = deployed.outcomes("answered")
        assert [deployed.ask(one)[:2] for one in REQUESTS] == [(text, number) for text in TEXTS]
        assert deployed.outcomes("answered") == before + len(REQUESTS)

    agent = psutil.Process(ask_report(indexed.pool)["pid"])
    agent.send_signal(signal.SIGSTOP)
    try:
        texts, numbers, _ = zip(*map(deployed.ask, REQUESTS), strict=True)
    finally:
        agent.send_signal(signal.SIGCONT)
    assert list(texts) == TEXTS and set(numbers) == {0, 1}
    assert (deployed.outcomes("index_late"), deployed.outcomes("unasked")) == (3, 1)
