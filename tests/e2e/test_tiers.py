"""Two vLLM servers and one of SGLang, as on hosts of their own, share prefixes through a real Mooncake cluster.

Whatever becomes of the agents, the cluster and the engines, every text is that of vLLM without the connector.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from long_form import LONG

from e2e.client import Answer
from e2e.conftest import QWEN3_ARGS
from e2e.hosts import ENGINE, Agent, Cluster, silent_master
from e2e.pages import PAGE_TOKENS, wait_for
from e2e.process import assert_no_complaints, pool_folder
from e2e.questions import Question
from e2e.server import ONE_CORE, Server
from e2e.sglang_server import ONE_CORE as SGLANG_ONE_CORE
from e2e.sglang_server import SGLangServer

KILLS = 100 if LONG else 3
RESTARTS = 3
WRITTEN_S, SHARED_S = 20.0, 300.0
_numbers = itertools.count()


@dataclass
class Host:
    server: Server | SGLangServer
    agent: Agent


class Fleet:
    """Hosts, and the questions that they are asked, each time under a salt of its own: nobody has met the pages."""

    def __init__(self, hosts: list[Host], cluster: Cluster, questions: list[Question]) -> None:
        self.first, self.second, self.sglang = hosts
        self.hosts, self.cluster, self._questions = hosts, cluster, questions

    def question(self) -> tuple[Question, str]:
        number = next(_numbers)
        return self._questions[number % len(self._questions)], f"fleet {number}"

    def ask(self, host: Host, question: Question, salt: str) -> Answer:
        """The answer, whose text is right."""
        answer = host.server.ask(question.prompt, max_tokens=len(question.answer), cache_salt=salt)
        assert answer.token_ids == question.answer
        return answer

    def ask_in_a_queue(self, host: Host, question: Question, salt: str) -> Answer:
        """The same behind another request, for which vLLM has the question wait: time to fetch what it needs."""
        runs = threading.Event()

        def ask_another() -> None:
            try:
                host.server.ask(question.prompt[:40], max_tokens=64, on_text=lambda text: runs.set())
            finally:
                runs.set()

        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(ask_another)
            runs.wait()
            answer = self.ask(host, question, salt)
            other.result()
        return answer

    def shares(self, one: Host, other: Host) -> bool:
        """One computes a prompt, and the other is asked for it once the tier has it: whether it has pages of it."""
        question, salt = self.question()
        count = one.agent.count("written_pages") + question.num_full_pages
        assert self.ask(one, question, salt).cached_tokens == 0
        give_up_s = time.monotonic() + WRITTEN_S
        while one.agent.count("written_pages") < count and time.monotonic() < give_up_s:
            time.sleep(0.05)
        tokens = self.ask_in_a_queue(other, question, salt).cached_tokens
        assert tokens % PAGE_TOKENS == 0
        return tokens > 0

    def wait_until_shared(self, one: Host, other: Host) -> None:
        """On a busy machine a save may be given up, and SGLang may compute before it hears of the pages."""
        wait_for(lambda: self.shares(one, other), "pages of one host on the other", deadline_s=SHARED_S, every_s=0.0)


@pytest.fixture(scope="module")
def fleet(questions: dict[str, Question], qwen3: Path, logs: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        cluster = Cluster(logs / "cluster")
        stack.callback(cluster.stop)
        servers: list[Server | SGLangServer] = []
        hosts = []
        for number in range(3):
            pool = stack.enter_context(pool_folder())
            log = logs / f"tiers-{number}.log"
            if number < 2:
                one_at_a_time = (*QWEN3_ARGS, "--max-num-seqs", "1")
                server = Server(qwen3, log=log, pool=pool, args=one_at_a_time, env=ONE_CORE | ENGINE)
            else:
                server = SGLangServer(qwen3, log=log, pool=pool, env=SGLANG_ONE_CORE | ENGINE)
            servers.append(server)
            server.start()
            stack.callback(server.stop)
            agent = Agent(pool, logs / f"tiers-{number}-agent.log", ENGINE)
            stack.callback(agent.stop)
            hosts.append(Host(server, agent))
        for host in hosts:
            host.agent.start(cluster.tier)
        for server in servers:
            server.wait_until_ready()
        yield Fleet(hosts, cluster, [questions[f"number {number}"] for number in range(5)])
    assert_no_complaints(servers)


def test_a_server_loads_what_another_one_computed(fleet: Fleet) -> None:
    fleet.wait_until_shared(fleet.first, fleet.second)
    fleet.wait_until_shared(fleet.second, fleet.first)
    server = fleet.second.server
    assert isinstance(server, Server)
    wait_for(lambda: server.metric("vllm:mooncake_connector_tier_hit_tokens_total") > 0, "the hit in the metrics")


def test_sglang_loads_what_vllm_computed(fleet: Fleet) -> None:
    fleet.wait_until_shared(fleet.first, fleet.sglang)


def test_vllm_loads_what_sglang_computed(fleet: Fleet) -> None:
    fleet.wait_until_shared(fleet.sglang, fleet.first)


def test_whatever_is_killed_every_text_is_right(fleet: Fleet) -> None:
    """In an order that is another one each time; afterwards pages are shared again."""
    source = random.Random()
    kills: dict[str, Callable[[], None]] = {
        "agent": lambda: source.choice(fleet.hosts).agent.kill(),
        "master": lambda: fleet.cluster.kill("master"),
        "node": lambda: fleet.cluster.kill("client"),
    }
    names = [name for _ in range(-(-KILLS // len(kills))) for name in source.sample(sorted(kills), len(kills))]
    for number, name in enumerate(names[:KILLS]):
        if number and number % (RESTARTS * len(kills)) == 0:  # a cluster stands so many
            fleet.cluster.stop()
            fleet.cluster.start()
            for host in fleet.hosts:
                host.agent.restart(fleet.cluster.tier)
        question, salt = fleet.question()
        fleet.ask(source.choice(fleet.hosts), question, salt)
        kills[name]()
        for host in source.sample(fleet.hosts, len(fleet.hosts)):
            fleet.ask(host, question, salt)
            fleet.ask(host, *fleet.question())
        for host in fleet.hosts:
            host.agent.restart()
    fleet.wait_until_shared(fleet.first, fleet.second)


def test_a_tier_that_never_answers_changes_nothing(fleet: Fleet) -> None:
    with silent_master() as tier:
        for host in fleet.hosts:
            host.agent.restart(tier)
        for _ in range(3):
            question, salt = fleet.question()
            for host in fleet.hosts:
                assert fleet.ask(host, question, salt).cached_tokens == 0
        for host in fleet.hosts:
            host.agent.restart(fleet.cluster.tier)
    fleet.wait_until_shared(fleet.first, fleet.second)


def test_an_engine_that_was_killed_leaves_what_it_shared_and_shares_again(fleet: Fleet) -> None:
    question, salt = fleet.question()
    before = fleet.second.agent.count("written_pages")
    fleet.ask(fleet.second, question, salt)
    fleet.second.server.kill()
    for host in (fleet.first, fleet.sglang):
        fleet.ask(host, question, salt)
    fleet.second.server.restart()
    fleet.ask(fleet.second, question, salt)
    wait_for(lambda: fleet.second.agent.count("written_pages") > before, "the agent goes on")
    fleet.wait_until_shared(fleet.second, fleet.first)
    fleet.wait_until_shared(fleet.first, fleet.second)
