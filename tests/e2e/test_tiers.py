"""Two vLLM servers and one of SGLang, on hosts of their own, share prefixes through a real Mooncake cluster.

Each host is a network namespace with a pool and an agent; beside vLLM is a node of the cluster, and its master is on a
fourth host. Where namespaces cannot be made, all of it runs on one address. Whatever becomes of the agents, the
cluster, the engines and the network, every text is that of vLLM without the connector.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent.asking import Client
from long_form import LONG
from mapped import of_mooncake

from e2e.client import Answer
from e2e.conftest import QWEN3_ARGS
from e2e.hosts import ENGINE, Agent, Cluster
from e2e.index import http
from e2e.network import LOOPBACK, Link, NoNamespaces, device_down, hosts_apart
from e2e.network import Host as Network
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.process import assert_no_complaints, pool_folder
from e2e.questions import Question
from e2e.said import LOGS_REQUESTS, explained_in_words, line, lines
from e2e.server import ONE_CORE, Server
from e2e.sglang_server import ONE_CORE as SGLANG_ONE_CORE
from e2e.sglang_server import SGLangServer

KILLS = {"agent": 30, "master": 30, "node": 30, "engine": 10} if LONG else {"agent": 1, "master": 1, "node": 1}
SHARED_EVERY = 10
WRITTEN_S, SHARED_S = 20.0, 300.0
CUT_NBYTES = 256 << 10  # a quarter of a page
_numbers = itertools.count()


@dataclass
class Host:
    server: Server | SGLangServer
    agent: Agent
    network: Network
    index: Client
    """Of the agent, which speaks HTTP beside its own protocol."""


class Fleet:
    """Hosts, and the questions that they are asked, each time under a salt of its own: nobody has met the pages."""

    def __init__(self, hosts: list[Host], cluster: Cluster, link: Link | None, questions: list[Question]) -> None:
        self.first, self.second, self.sglang = hosts
        self.hosts, self.cluster, self._link, self._questions = hosts, cluster, link, questions

    @property
    def link(self) -> Link:
        """The network between the hosts; tests that need it are skipped where there is none."""
        if self._link is None:
            pytest.skip("NOT TESTED: network namespaces and TUN devices need root, `ip` and /dev/net/tun")
        return self._link

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

    def give(self, one: Host) -> tuple[Question, str]:
        """A question that this host has computed and given to the tier, unless that takes too long."""
        question, salt = self.question()
        count = one.agent.count("written_pages") + question.num_full_pages
        assert self.ask(one, question, salt).cached_tokens == 0
        give_up_s = time.monotonic() + WRITTEN_S
        while one.agent.count("written_pages") < count and time.monotonic() < give_up_s:
            time.sleep(0.05)
        return question, salt

    def shares(self, one: Host, other: Host) -> bool:
        """One computes a prompt, and the other is asked for it once the tier has it: whether it has pages of it."""
        question, salt = self.give(one)
        tokens = self.ask_in_a_queue(other, question, salt).cached_tokens
        assert tokens % PAGE_TOKENS == 0
        return tokens > 0

    def wait_until_shared(self, one: Host, other: Host) -> None:
        """On a busy machine a save may be given up, and SGLang may compute before it hears of the pages."""
        wait_for(lambda: self.shares(one, other), "pages of one host on the other", deadline_s=SHARED_S, every_s=0.0)

    def heal(self) -> None:
        """Whatever was killed runs again."""
        self.cluster.start()
        for host in self.hosts:
            if not host.agent.is_running:
                host.agent.start()
            if not host.server.is_running:
                host.server.restart()


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[list[Network], Link | None]]:
    """Of three hosts for engines, and one for the master."""
    with ExitStack() as stack:
        try:
            found: tuple[list[Network], Link | None] = stack.enter_context(hosts_apart(4))
        except NoNamespaces as error:
            warnings.warn(f"NOT TESTED with hosts apart, all share one address: {error}", stacklevel=1)
            found = [LOOPBACK] * 4, None
        yield found


@pytest.fixture(scope="module")
def fleet(
    questions: dict[str, Question], qwen3: Path, logs: Path, network: tuple[list[Network], Link | None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:  # fmt: skip
    (*places, place_of_master), link = network
    with ExitStack() as stack:
        cluster = Cluster(place_of_master, places[:2], logs / "cluster")
        stack.callback(cluster.stop)
        hosts = []
        for number, place in enumerate(places):
            pool = stack.enter_context(pool_folder())
            log, env = logs / f"tiers-{number}.log", {**ENGINE, **place.env}
            at = {"host": place.control, "launcher": place.launcher}
            server: Server | SGLangServer
            if number < 2:
                one_at_a_time = (*QWEN3_ARGS, "--max-num-seqs", "1")
                server = Server(qwen3, log=log, pool=pool, args=one_at_a_time, env=ONE_CORE | LOGS_REQUESTS | env, **at)
            else:
                server = SGLangServer(qwen3, log=log, pool=pool, env=SGLANG_ONE_CORE | env, **at)
            server.start()
            stack.callback(server.stop)
            index, settings = http(tmp_path_factory.mktemp("token"), place.control)
            agent = Agent(pool, logs / f"tiers-{number}-agent.log", ENGINE | settings, place)
            stack.callback(agent.stop)
            hosts.append(Host(server, agent, place, index))
        cluster.start()
        for host in hosts:
            host.agent.start(cluster.tier)
        for host in hosts:
            host.server.wait_until_ready()
        yield Fleet(hosts, cluster, link, [questions[f"number {number}"] for number in range(5)])
    assert_no_complaints(host.server for host in hosts)


def test_a_server_loads_what_another_one_computed(fleet: Fleet) -> None:
    fleet.wait_until_shared(fleet.first, fleet.second)
    fleet.wait_until_shared(fleet.second, fleet.first)
    server = fleet.second.server
    assert isinstance(server, Server)
    wait_for(lambda: server.metric("vllm:mooncake_connector_tier_hit_tokens_total") > 0, "the hit in the metrics")
    assert ("mooncake", True) in {(said["tier"], int(said["hit_tokens"]) > 0) for said in lines(server)}


def test_what_an_agent_did_not_say_in_time_is_late(fleet: Fleet) -> None:
    fleet.wait_until_shared(fleet.first, fleet.second)
    question, salt = fleet.give(fleet.first)
    host = fleet.second
    with host.agent.standing_still():
        said = line(host.server, lambda: fleet.ask(host, question, salt))
        assert (said["miss"], said["hit_tokens"], said["tier"]) == ("late", "0", "-")
    explained_in_words(host.server, host.agent.pool, said)


def test_sglang_loads_what_vllm_computed(fleet: Fleet) -> None:
    fleet.wait_until_shared(fleet.first, fleet.sglang)


def test_vllm_loads_what_sglang_computed(fleet: Fleet) -> None:
    fleet.wait_until_shared(fleet.sglang, fleet.first)


def test_mooncakes_library_is_in_the_agents_and_in_no_process_of_an_engine(fleet: Fleet) -> None:
    """Although SGLang's environment has it; vLLM's has not, so there it is seen that it is not needed."""
    fleet.wait_until_shared(fleet.first, fleet.sglang)
    for host in fleet.hosts:
        assert of_mooncake(host.agent.pid)
        assert not [process for process in host.server.processes() if of_mooncake(process.pid)]


def says(host: Host, question: Question, salt: str) -> dict[str, int]:
    """What the index of a host says of its server, about pages of which nothing is on a device: by medium."""
    model = host.server.model.name
    assert "remark" not in host.index.register("here", modelname=model)
    said = host.index.query(question.prompt, model=model, cache_salt=salt)["default"]["here"]
    assert (said["GPU"], said["longest_matched"]) == (0, max(said["CPU"], said["DISK"]))
    return {medium: said[medium] for medium in ("CPU", "DISK")}


def test_what_the_index_says_of_the_cluster_is_what_the_server_fetches(fleet: Fleet) -> None:
    """Each question is one that the host's own pool has never seen."""
    fleet.wait_until_shared(fleet.first, fleet.second)  # its pages say what the pool calls the model
    assert says(fleet.second, *fleet.question()) == {"CPU": 0, "DISK": 0}

    def says_and_fetches() -> bool:
        question, salt = fleet.give(fleet.first)
        said = says(fleet.second, question, salt)
        fetched = fleet.ask_in_a_queue(fleet.second, question, salt).cached_tokens
        return said == {"CPU": fetched, "DISK": 0} and fetched == question.num_full_pages * PAGE_TOKENS

    wait_for(says_and_fetches, "a prompt in the cluster", deadline_s=SHARED_S, every_s=0.0)


def test_what_the_index_says_of_a_disk_is_what_the_server_fetches(fleet: Fleet, tmp_path: Path) -> None:
    """The pool loses what the disk has by then. The server, which asked for it when nobody had it, asks anew some
    seconds later only, however fast the machine is: so one prompt is sent until then."""
    host = fleet.second
    fleet.wait_until_shared(fleet.first, host)  # its pages say what the pool calls the model
    host.agent.restart({"kind": "disk", "path": str(tmp_path / "disk"), "capacity": "256MiB"})
    pages = Pages(host.agent.pool, host.server.model)
    question, salt = fleet.question()
    tokens = question.num_full_pages * PAGE_TOKENS

    def says_and_fetches() -> bool:
        host.server.reset_prefix_cache()
        said = says(host, question, salt)
        fetched = fleet.ask_in_a_queue(host, question, salt).cached_tokens
        if said == {"CPU": 0, "DISK": fetched} and fetched == tokens:
            return True
        if says(host, question, salt)["CPU"] == tokens:  # else a save goes on, or was given up
            for page in range(question.num_full_pages):
                pages.remove(question.prompt, page, cache_salt=salt)
        return False

    try:
        wait_for(says_and_fetches, "a prompt on the disk", deadline_s=SHARED_S, every_s=0.0)
    finally:
        host.agent.restart(fleet.cluster.tier)


def test_whatever_is_killed_every_text_is_right(fleet: Fleet) -> None:
    """In an order that is another one each time; afterwards pages are shared again."""
    source = random.Random()
    kills: dict[str, Callable[[], None]] = {
        "agent": lambda: source.choice(fleet.hosts).agent.kill(),
        "master": lambda: fleet.cluster.kill("master"),
        "node": lambda: fleet.cluster.kill(source.choice(("node-0", "node-1"))),
        "engine": lambda: source.choice(fleet.hosts).server.kill(),
    }
    names = [name for name, count in KILLS.items() for _ in range(count)]
    for number, name in enumerate(source.sample(names, len(names)), 1):
        print(f"kill {number} of {len(names)}: {name}")  # shown where it fails
        question, salt = fleet.question()
        fleet.ask(source.choice(fleet.hosts), question, salt)
        kills[name]()
        for host in source.sample(fleet.hosts, len(fleet.hosts)):
            if host.server.is_running:
                fleet.ask(host, question, salt)
                fleet.ask(host, *fleet.question())
        fleet.heal()
        for host in fleet.hosts:
            fleet.ask(host, question, salt)
        if number % SHARED_EVERY == 0:
            fleet.wait_until_shared(*source.sample(fleet.hosts, 2))
    fleet.wait_until_shared(fleet.first, fleet.second)


def test_a_tier_that_never_answers_changes_nothing(fleet: Fleet) -> None:
    with fleet.cluster.silent_master():
        for host in fleet.hosts:
            host.agent.restart()
        for _ in range(3):
            question, salt = fleet.question()
            for host in fleet.hosts:
                assert fleet.ask(host, question, salt).cached_tokens == 0
    for host in fleet.hosts:  # or they look for it again in up to a minute
        host.agent.restart()
    fleet.wait_until_shared(fleet.first, fleet.second)


def test_a_host_that_loses_its_network_in_mid_fetch_computes_and_shares_again(fleet: Fleet) -> None:
    """First without a word, so that nobody's connection ends: answers that come meanwhile waited for no one. Then its
    device is down as well."""
    cut = fleet.second.network.data

    def breaks_a_fetch() -> bool:
        question, salt = fleet.give(fleet.first)
        fleet.link.set(cut_after={cut: CUT_NBYTES})
        fleet.ask_in_a_queue(fleet.second, question, salt)
        return cut in fleet.link.cut

    try:
        wait_for(breaks_a_fetch, "a fetch that the network breaks", deadline_s=SHARED_S, every_s=0.0)
        for host in fleet.hosts:
            fleet.ask(host, *fleet.question())
        with device_down(fleet.second.network):
            for host in fleet.hosts:
                fleet.ask(host, *fleet.question())
    finally:
        fleet.link.set()
    fleet.wait_until_shared(fleet.first, fleet.second)
    fleet.wait_until_shared(fleet.second, fleet.first)


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
