"""`mooncake-connector up` with a tier behind the pool: pages outlive the pool, and the tier's agent any instance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from long_form import LONG

from e2e.client import HttpClient
from e2e.deploy.deployments import LIMIT_S, Deployed, Way
from e2e.deploy.test_up import REQUESTS
from e2e.pages import clear, wait_for
from e2e.process import pool_folder
from mooncake_connector.errors import PoolError
from store_client.agent.visit import ask_report

pytestmark = [pytest.mark.long, pytest.mark.skipif(not LONG, reason="a pair of instances of its own")]
ASKED = REQUESTS[0]
PAGES = 4  # of its prompt
BOTH = 4
"""A scheduler and a worker of each instance use the agent."""


@dataclass(frozen=True, slots=True)
class WithTier(Way):
    pool: Path = Path()
    folder: Path = Path()

    def file(self, ports: dict[str, int], logs: Path) -> str:
        settings = f"""\
  pool: {self.pool}
  capacity: 1GiB
  secret_file: {self.folder / "secret"}
  tiers:
    - kind: folder
      path: {self.folder / "shared"}
"""
        return Way.file(self, ports, logs).replace("  prefix_reuse: false\n", settings)


class Tiered(Deployed):
    way: WithTier

    def agent(self) -> dict[str, Any] | None:
        """What the agent of the pool says of itself, if there is one."""
        with suppress(PoolError):
            return ask_report(self.way.pool)
        return None

    def wait_for_agent(self, users: int, other_than: int = 0) -> int:
        """Its process, once so many instances use it."""
        found: list[int] = []

        def serves() -> bool:
            report = self.agent()
            if report is not None and report["users"] >= users and report["pid"] != other_than:
                found.append(report["pid"])
            return bool(found)

        wait_for(serves, f"an agent that {users} instances use", deadline_s=LIMIT_S)
        return found[0]

    def written_pages(self) -> int:
        report = self.agent()
        return 0 if report is None else int(report["tiers"][0]["written_pages"])

    def tier_hit_tokens(self) -> float:
        clients = [HttpClient("127.0.0.1", self.ports[role]) for role in ("prefill", "decode")]
        return sum(one.metric("vllm:mooncake_connector_tier_hit_tokens_total") for one in clients)

    def wait_for_a_hit_in_the_tier(self) -> None:
        """The pool is empty, and what it had is loaded all the same. A busy machine may compute it first, and what was
        loaded is counted with the next answer."""

        def hits() -> bool:
            before = self.tier_hit_tokens()
            clear(self.way.pool)
            assert self.answer(ASKED) == ASKED.text
            return self.tier_hit_tokens() > before

        wait_for(hits, "tokens of the tier", deadline_s=LIMIT_S)


@pytest.fixture
def deployed(tmp_path: Path, logs: Path) -> Iterator[Tiered]:
    (tmp_path / "shared").mkdir(mode=0o700)
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text("as long as it has to be, and longer")
    with pool_folder() as pool:
        found = Tiered(WithTier("vllm", 1, "kind: builtin", pool, tmp_path), tmp_path, logs / "up-tiers")
        try:
            found.start()
            yield found
        finally:
            found.stop()


def test_pages_come_from_the_tier_and_the_agent_comes_back_with_any_instance(deployed: Tiered) -> None:
    assert deployed.wait_until_it_answers(ASKED) == ASKED.text
    agent = deployed.wait_for_agent(users=BOTH)
    wait_for(lambda: deployed.written_pages() >= PAGES, "pages in the tier")
    deployed.wait_for_a_hit_in_the_tier()

    keeper = psutil.Process(agent).parent()
    assert keeper is not None
    server = next(one for one in keeper.children() if one.pid != agent and "-m" in one.cmdline()[:3])
    server.kill()  # its keeper takes the agent along
    deployed.wait_for_agent(users=1, other_than=agent)
    assert not psutil.pid_exists(agent)
    assert deployed.wait_until_it_answers(ASKED) == ASKED.text
    deployed.wait_for(" is ready after", times=4)  # once more than each process
    deployed.wait_for_a_hit_in_the_tier()

    processes = deployed.processes()
    assert deployed.stop() == 0
    assert [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert deployed.agent() is None
