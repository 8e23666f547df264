"""A container's memory limit: the pool stops growing before it, since the kernel kills who is beyond it."""

import os
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
from store.pools import as_root, space_in

from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore
from store_client.embedded import folder
from store_client.embedded.memory_limit import is_in_memory, left_for, memory_left
from store_client.testing import chain, put_chain

MIB = 1 << 20
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
NO_LIMIT = str(0x7FFFFFFFFFFFF000)
FILLS = """
import sys
from store_client import EmbeddedStore
from store_client.embedded import securing
from store_client.testing import *
if sys.argv[2] == "blind":
    securing.left_for = lambda file: None
with EmbeddedStore(sys.argv[1], 512 << 20) as store:
    space = store.space(namespace(), SHARD)
    for number in range(400):
        put_chain(space, chain(f"{number}", 1), nbytes=1 << 20)
    assert store.stats().pages < 400
    assert space.lookup(chain("399", 1)).pages == 1
    print(store.stats().used_nbytes)
"""


def group(folder, limit=None, used=0, cached=0, high=None, *, version=2):
    """Files of a group as the kernel shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        files = {"memory.max": limit or "max", "memory.high": high or "max", "memory.current": used}
        stat = f"anon 1\nactive_file {cached}\ninactive_file {cached}\nshmem 77\n"
    else:
        files = {"memory.limit_in_bytes": limit or NO_LIMIT, "memory.usage_in_bytes": used}
        stat = f"cache 1\ninactive_file 7\ntotal_active_file {cached}\ntotal_inactive_file {cached}\n"
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(stat)


@pytest.fixture
def said(tmp_path):
    return tmp_path / "cgroup"


def left(said, tmp_path, text):
    said.write_text(text)
    return memory_left(said, tmp_path / "mounted")


class TestWhatGroupsSay:
    def test_the_tightest_of_a_group_and_those_around_it_counts(self, said, tmp_path):
        root = tmp_path / "mounted"
        group(root / "pods" / "one", limit=1000, used=300, cached=50)
        group(root / "pods", limit=5000, used=4400)
        assert left(said, tmp_path, "0::/pods/one\n") == 100
        group(root / "pods")
        assert left(said, tmp_path, "0::/pods/one\n") == 1000 - 100 - 300 + 100

    def test_of_one_that_is_slowed_down_sooner_than_killed_that_counts(self, said, tmp_path):
        group(tmp_path / "mounted" / "a", limit=1000, high=500, used=100)
        assert left(said, tmp_path, "0::/a\n") == 500 - 50 - 100

    def test_a_container_sees_its_own_as_the_root(self, said, tmp_path):
        group(tmp_path / "mounted", limit=1000, used=100)
        assert left(said, tmp_path, "0::/\n") == 800
        assert left(said, tmp_path, "0::/docker/0123/not/here\n") == 800
        assert left(said, tmp_path, "0::/../beside\n") == 800

    def test_version_1_and_both_together(self, said, tmp_path):
        root = tmp_path / "mounted"
        group(root / "memory" / "docker" / "x", limit=1000, used=100, cached=100, version=1)
        group(root / "memory", version=1)
        text = "9:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n"
        assert left(said, tmp_path, text) == 1000
        (root / "unified").mkdir()
        assert left(said, tmp_path, text) == 1000
        group(root / "unified", limit=600, used=100)
        assert left(said, tmp_path, text) == 440

    def test_in_version_1_what_is_swapped_out_counts_where_that_has_a_limit(self, said, tmp_path):
        """Of a group whose memory and swap together have the limit of its memory, as a container has without swap."""
        root = tmp_path / "mounted" / "memory"
        group(root, limit=1000, used=100, cached=20, version=1)
        (root / "memory.memsw.limit_in_bytes").write_text("1000\n")
        (root / "memory.memsw.usage_in_bytes").write_text("700\n")
        assert left(said, tmp_path, "4:memory:/x\n") == 1000 - 100 - 700 + 40
        (root / "memory.memsw.limit_in_bytes").write_text(NO_LIMIT)
        assert left(said, tmp_path, "4:memory:/x\n") == 1000 - 100 - 100 + 40

    def test_a_groups_name_may_be_any_bytes(self, said, tmp_path):
        """An error that is none of the system's ended the put, not its growth."""
        name = b"caf\xe9"
        group(tmp_path / "mounted" / os.fsdecode(name), limit=1000, used=100)
        said.write_bytes(b"1:name=systemd:/" + name + b"\n0::/" + name + b"\n")
        assert memory_left(said, tmp_path / "mounted") == 800

    def test_beyond_the_limit_nothing_is_left(self, said, tmp_path):
        group(tmp_path / "mounted", limit=1000, used=990)
        assert left(said, tmp_path, "0::/\n") == 0

    @pytest.mark.parametrize("text", ["", "0::/\n", "0::/gone\n", "garbage\n:::\n", "4:memory:/x\n"])
    def test_without_a_limit_there_is_none(self, said, tmp_path, text):
        assert left(said, tmp_path, text) is None
        group(tmp_path / "mounted")
        group(tmp_path / "mounted" / "memory", version=1)
        assert left(said, tmp_path, text) is None

    def test_files_that_are_missing_or_say_nonsense_are_none(self, said, tmp_path):
        assert memory_left(tmp_path / "nothing", tmp_path) is None
        group(tmp_path / "mounted", limit=1000, used=100)
        (tmp_path / "mounted" / "memory.stat").write_text("nonsense\n")
        assert left(said, tmp_path, "0::/\n") == 800
        (tmp_path / "mounted" / "memory.current").write_text("?")
        assert left(said, tmp_path, "0::/\n") is None


def test_shared_memory_is_told_from_a_disk(tmp_path):
    assert is_in_memory(Path("/dev/shm")) and not is_in_memory(Path("/proc"))
    assert not is_in_memory(tmp_path / "nothing")


def test_a_limit_counts_for_what_is_in_memory_alone(monkeypatch):
    monkeypatch.setattr("store_client.embedded.memory_limit.memory_left", lambda: 5)
    assert left_for(Path("/dev/shm")) == 5 and left_for(Path("/proc")) is None


class TestThePool:
    def test_the_capacity_nobody_set_is_a_quarter_of_what_is_left(self, pool, monkeypatch):
        monkeypatch.setattr(folder, "left_for", lambda path: 200 * MIB)
        assert folder.check_capacity(pool.parent, None, 0) == 50 * MIB
        monkeypatch.setattr(folder, "left_for", lambda path: 2 * MIB)
        with pytest.raises(PoolError, match="within the memory limit"):
            folder.check_capacity(pool.parent, None, 0)
        monkeypatch.setattr(folder, "left_for", lambda path: None)
        assert folder.check_capacity(pool.parent, None, 0) > 50 * MIB

    def test_an_index_beyond_what_is_left_is_refused(self, pool, monkeypatch):
        monkeypatch.setattr(folder, "left_for", lambda path: MIB)
        with pytest.raises(PoolError, match=r"the index for capacity 512.0 MiB takes .* leaves 1.0 MiB; set a smaller"):
            folder.check_capacity(pool.parent, 512 * MIB, 0)

    def test_a_capacity_whose_index_does_not_fit_does_not_cost_the_pool(self, pool, monkeypatch):
        """It is more than the index there can serve, so a new one would be made."""
        with EmbeddedStore(pool, 16 * MIB) as store:
            put_chain(space_in(store), chain("kept", 3))
        monkeypatch.setattr(folder, "left_for", lambda path: MIB)
        with pytest.raises(PoolError, match=r"the index for capacity 4\.0 GiB takes"):
            EmbeddedStore(pool, 4 << 30)
        with EmbeddedStore(pool, 32 * MIB) as store:  # with the index that it has
            assert space_in(store).lookup(chain("kept", 3)).pages == 3

    @as_root
    @pytest.mark.parametrize("looks", ["as ever", "blind"])
    def test_a_container_with_a_limit_is_not_killed_for_its_pool(self, pool, looks):
        """With a real group. One that does not look is killed, so this tells something."""
        with limited(256 * MIB) as enter:
            ended = subprocess.run(
                [sys.executable, "-c", FILLS, pool, looks],
                preexec_fn=enter, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
        if looks == "blind":
            assert ended.returncode == -9
        else:
            assert ended.returncode == 0, ended.stderr
            assert 64 * MIB < int(ended.stdout) < 256 * MIB
            assert "the memory limit of this process's control group leaves too little" in ended.stderr


@contextmanager
def limited(nbytes):
    """Yields what a process calls to enter a group with this limit. Skips where none can be made."""
    root = V1 if V1.is_dir() else V2
    made = root / f"mooncake-test-{uuid.uuid4().hex[:8]}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if root is V1 else "memory.max")).write_text(str(nbytes))
        swap = made / ("memory.memsw.limit_in_bytes" if root is V1 else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(nbytes if root is V1 else 0))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"NOT TESTED: no control group with a memory limit can be made here ({error})")
    try:
        yield lambda: (made / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        made.rmdir()
