"""`mooncake-connector cluster up`: a cluster that can be used as its words say, and of which nothing stays."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from tiers.mooncake_cluster import needs_mooncake, until

from mooncake_connector.config.tiers import decode_tiers
from store_client.base import Put
from store_client.testing import chain
from store_client.tiers.open import open_tier
from store_client.tiers.testing import Memory, new_space, read, write

needs_mooncake()
MAIN = "from mooncake_connector.cli.entry import main; main()"


@pytest.fixture
def cluster_up(tmp_path):
    """Starts it; gives the process and a function for what it has said."""
    started = []

    def start(*options):
        output = tmp_path / "output"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", MAIN, "cluster", "up", *options], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TMPDIR": str(tmp_path), "MARK": str(tmp_path)},
            )  # fmt: skip
        started.append(process)
        return process, output.read_text

    yield start
    for process in started:
        process.kill()
        process.wait()
    until(lambda: not running(tmp_path), "nothing stays")


def running(mark):
    """The processes that were started with this mark in their environment, which all inherit."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if f"MARK={mark}".encode() in file.read():
                    found.append(int(name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_it_can_be_used_as_it_says_and_leaves_no_process(cluster_up, tmp_path, how):
    process, said = cluster_up("--nodes", "2", "--memory", "64MiB")
    until(lambda: "The cluster is ready" in said() or process.poll() is not None, "it is ready")
    assert "2 nodes with 32.0 MiB each" in said() and "0.0.0.0" in said(), said()
    entry = re.search(r"export MOONCAKE_CONNECTOR_TIERS='(.*)'", said())[1]
    (settings,) = decode_tiers(json.loads(entry), strict=True)
    tier = open_tier(settings, b"")
    try:
        memory, space, keys = Memory(4 << 20), new_space(), chain("a", 4)
        tier.register(memory.all)
        assert write(tier, memory, space, keys) == [Put.STORED] * 4
        assert all(read(tier, memory, space, keys))
    finally:
        tier.close()
    assert len(running(tmp_path)) >= 7, "up, three keepers and what they keep"
    process.send_signal(how)
    process.wait(120)
    until(lambda: not running(tmp_path), "all processes are gone")
    if how == signal.SIGINT:
        assert process.returncode == 0 and "all processes have ended" in said()
        assert [one.name for one in tmp_path.iterdir()] == ["output"], "the logs are gone too"


def test_too_little_memory_is_refused(cluster_up):
    process, said = cluster_up("--nodes", "4", "--memory", "32MiB")
    assert process.wait(120) == 2
    assert "each needs 16.0 MiB" in re.sub(r"\s+", " ", said().replace("│", ""))
