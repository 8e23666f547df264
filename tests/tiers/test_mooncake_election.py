"""The tier `mooncake` with two masters that elect a leader through a real etcd, when the leader is killed under load.

An election takes as long as the lease of the dead leader in etcd, so there is one of them, and three in the long form.
"""

import json
import shutil
import threading
import time

import pytest
from long_form import LONG
from tiers.mooncake_cluster import LEAVES_OUT, Process, needs_mooncake

from mooncake_connector.config.tiers import MooncakeTier
from mooncake_connector.deploy.commands import Command
from mooncake_connector.deploy.watch import read as read_url
from store_client.base import Put
from store_client.testing import chain
from store_client.tiers.base import TierError
from store_client.tiers.mooncake import MooncakeCluster
from store_client.tiers.mooncake.cluster import free_ports, master_command, node_command
from store_client.tiers.testing import Memory, new_space, read, write

needs_mooncake()
PATIENCE_S = 600.0
ELECTIONS = 3 if LONG else 1
ROUNDS = 20 if LONG else 5
"""Of the load, before and after each election."""


def until(check, what):
    end_s = time.monotonic() + PATIENCE_S
    while not (found := check()):
        assert time.monotonic() < end_s, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.2)
    return found


class Elected:
    """etcd, two masters and two nodes."""

    def __init__(self, folder):
        client, peer, *ports = free_ports(10)
        at = f"http://127.0.0.1:{client}"
        self.address = f"etcd://127.0.0.1:{client}"
        arguments = (
            "etcd", "--data-dir", str(folder), "--listen-client-urls", at, "--advertise-client-urls", at,
            "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls",
            f"http://127.0.0.1:{peer}", "--initial-cluster", f"default=http://127.0.0.1:{peer}",
        )  # fmt: skip
        self.etcd = Process(Command("etcd", "etcd", arguments, {}, at, ()))
        flags = ("--enable_ha=true", f"--etcd_endpoints=127.0.0.1:{client}", *LEAVES_OUT)
        rest = iter(ports)
        self.masters = [Process(master_command(next(rest), next(rest), *flags)) for _ in range(2)]
        self.nodes = [
            Process(node_command(number, self.address, next(rest), next(rest), 128 << 20)) for number in range(2)
        ]

    def start(self):
        self.etcd.start()
        for master in self.masters:
            master.start(wait=False)
        until(self.leader, "a leader is elected")
        for node in self.nodes:
            node.start(wait=False)

    def leader(self):
        """The master that says it is the leader and serves."""
        for master in self.masters:
            said = read_url(f"{master.command.url}/health")
            if said and json.loads(said).get("role") == "leader" and json.loads(said).get("service_ready"):
                return master
        return None

    def kill(self):
        for one in (*self.nodes, *self.masters, self.etcd):
            one.kill()


class Load:
    """Writes and reads pages all the time. `read` holds every byte that comes back against what was written."""

    def __init__(self, tier):
        self._tier, self._memory = tier, Memory(16 << 20)
        self.rounds = self.failures = 0
        self.wrong = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        space, start = new_space(), self._memory._next
        self._tier.register(self._memory.all)
        while not self._stop.is_set():
            self._memory._next = start
            keys = chain(f"round {self.rounds} {self.failures}", 8)
            try:
                puts = write(self._tier, self._memory, space, keys)
                there = read(self._tier, self._memory, space, keys)
                good = Put.FAILED not in puts and all(there)
            except TierError:
                good = False
            except BaseException as error:
                self.wrong = error
                return
            self.rounds, self.failures = self.rounds + good, self.failures + (not good)
            time.sleep(0.05)

    def stop(self):
        self._stop.set()
        self._thread.join(PATIENCE_S)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("etcd") is None, reason="NOT TESTED: needs etcd (tests/requirements/system.txt)")
def test_the_leader_is_killed_under_load_and_the_other_one_goes_on(tmp_path):
    cluster = Elected(tmp_path / "etcd")
    tier = load = None
    try:
        cluster.start()
        tier = MooncakeCluster(MooncakeTier(master=cluster.address, host="127.0.0.1"))
        load = Load(tier)
        for _ in range(ELECTIONS):
            goal = load.rounds + ROUNDS
            until(lambda goal=goal: load.rounds >= goal or load.wrong, "pages are written and read")
            old = cluster.leader()
            old.kill()
            new = until(cluster.leader, "the other master leads")
            assert new is not old
            goal = load.rounds + ROUNDS
            until(lambda goal=goal: load.rounds >= goal or load.wrong, "pages are written and read again")
            assert load.wrong is None, load.wrong
            old.start(wait=False)
    finally:
        if load is not None:
            load.stop()
        if tier is not None:
            tier.close()
        cluster.kill()
    assert load.failures > 0, "nobody noticed that the leader was gone"
