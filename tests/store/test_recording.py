"""Recording a pool's traffic: what is written is what was asked for, and nothing else."""

import json
import signal

import pytest
from ground.terminal import Terminal
from simulated.waiting import wait_for
from store.pools import as_root, fill, inside, mounted, space_in
from typer.testing import CliRunner

from mooncake_connector.cli import record as record_
from mooncake_connector.cli.main import app
from store_client import EmbeddedStore
from store_client.embedded import table, watching
from store_client.embedded.names import hash_key, identify
from store_client.embedded.table import MOST_USES
from store_client.embedded.watching import UsedChain, Watch
from store_client.simulation.recording import Recording
from store_client.simulation.traces import read_trace
from store_client.testing import SHARD, chain, get_page, namespace, put_chain


@pytest.fixture
def clock(monkeypatch):
    """Turns the clock by which uses are counted apart; returns its step."""
    ahead = [0]
    was = table.now_ns
    for module in (table, watching):
        monkeypatch.setattr(module, "now_ns", lambda: was() + ahead[0])

    def step(seconds=2):
        ahead[0] += int(seconds * 1e9)
        return table.now_ns()

    return step


def names(space, keys):
    return tuple(hash_key(key, space._number) for key in keys)


def test_what_was_stored_or_read_is_told_with_what_it_hangs_on(store, space, clock):
    watch = Watch(identify((namespace().digest, SHARD)))
    put_chain(space, chain("before", 2))
    assert store.used_chains(watch) == []
    keys = chain("a", 4)
    put_chain(space, keys[:3])
    clock()
    (stored,) = store.used_chains(watch)
    assert stored.pages == names(space, keys[:3]) and stored.uses == (0, 0, 0)
    assert store.used_chains(watch) == []
    for key in keys[:2]:
        get_page(space, key)
    (read,) = store.used_chains(watch)
    assert read.pages == names(space, keys[:2]) and read.uses == (1, 1) and read.used_ns > stored.used_ns


def test_a_use_that_lies_ahead_hides_no_other_and_is_told_when_its_time_comes(store, space, clock):
    """As a process in another time namespace notes it."""
    watch = Watch(identify((namespace().digest, SHARD)))
    ahead = chain("ahead", 1)
    put_chain(space, ahead)
    store.used_chains(watch)
    pages = inside(store).table
    pages.backdate(pages.live_slots().tolist(), [table.now_ns() + 3600 * 10**9])
    put_chain(space, chain("a", 2))
    assert [each.pages for each in store.used_chains(watch)] == [names(space, chain("a", 2))]
    clock(7200)
    assert [each.pages for each in store.used_chains(watch)] == [names(space, ahead)]


def test_other_namespaces_are_not_told(store, clock):
    watch = Watch(identify((namespace().digest, SHARD)))
    store.used_chains(watch)
    put_chain(space_in(store, "other"), chain("a", 2))
    assert store.used_chains(watch) == []


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pages_stored_as_they_are_computed_are_one_request_and_a_read_begins_another(tmp_path):
    recording = Recording(tmp_path / "r", 64, 100)
    second = 10**9
    recording.add([UsedChain(5 * second, (1, 2), (0, 0))], 5 * second)
    recording.add([UsedChain(6 * second, (1, 2, 3), (0, 0, 0))], 6 * second)
    recording.add([UsedChain(20 * second, (1, 2, 3), (1, 1, 1))], 20 * second)
    recording.add([UsedChain(21 * second, (1, 2, 3, 4), (1, 1, 1, 0))], 21 * second)
    recording.close()
    header, *requests = written(tmp_path / "r")
    assert header == {"kind": "mooncake-connector-recording", "version": 1, "page_tokens": 64}
    assert [(each["timestamp"], each["input_length"]) for each in requests] == [(0, 192), (15_000, 256)]
    assert requests[0]["hash_ids"] == requests[1]["hash_ids"][:3]


def test_a_prompt_that_comes_again_and_again_is_recorded_each_time_but_at_most_once_a_second(tmp_path):
    """Uses of a page are counted up to a limit, and not those within a second of the one before."""
    recording, second = Recording(tmp_path / "r", 64, 100), 10**9
    for number in range(20):
        at_ns = 5 * number * second
        recording.add([UsedChain(at_ns, (1, 2), (min(number, MOST_USES),) * 2)], at_ns)
    for number in range(20):
        at_ns = 100 * second + number * second // 4
        recording.add([UsedChain(at_ns, (7, 8, 9), (MOST_USES, MOST_USES, 0))], at_ns)
    recording.close()
    found = sorted((each["timestamp"], len(each["hash_ids"])) for each in written(tmp_path / "r")[1:])
    assert found[:20] == [(5000 * number, 2) for number in range(20)]
    assert found[20:] == [(100_000 + 1250 * number, 3) for number in range(4)]


def test_a_recording_is_bounded_private_and_says_nothing_of_names(tmp_path):
    for name in ("one", "two"):
        recording = Recording(tmp_path / name, 64, 3)
        for i in range(9):
            recording.add([UsedChain(i * 10**9, (7, 100 + i), (0, 0))], (i + 1) * 10**11)
        recording.close()
        assert recording.requests == 3 and recording.is_full
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    one, two = (written(tmp_path / name)[1:] for name in ("one", "two"))
    assert len(one) == 3 and {line["hash_ids"][0] for line in one} != {line["hash_ids"][0] for line in two}
    assert len({line["hash_ids"][0] for line in one}) == 1
    assert {name for line in one for name in line} == {"timestamp", "input_length", "output_length", "hash_ids"}
    with pytest.raises(FileExistsError):
        Recording(tmp_path / "one", 64, 3)


def test_the_command_records_live_traffic_that_simulate_can_read(pool, tmp_path, monkeypatch):
    fill(pool)
    file, keys = tmp_path / "trace.jsonl", chain("live", 3)
    with EmbeddedStore(pool) as store:
        space, looks = space_in(store), []

        def live(self, chains, now_ns):
            looks.append(chains)
            if len(looks) == 1:
                put_chain(space, keys)
            if chains:
                add(self, chains, now_ns)
                raise KeyboardInterrupt

        add = Recording.add
        monkeypatch.setattr(record_.Recording, "add", live)
        result = CliRunner().invoke(app, ["record", str(file), "--pool", str(pool), "--for", "120s"])
    assert result.exit_code == 0 and "1 requests in" in result.output, result.output
    trace = read_trace(file)
    assert [len(request.pages) for request in trace.requests] == [3]
    again = CliRunner().invoke(app, ["record", str(file), "--pool", str(pool)])
    assert again.exit_code == 1 and "exists: name a new file" in again.output


def test_a_recording_of_a_pool_without_pages_begins_after_the_first(pool, tmp_path, monkeypatch):
    file, waited = tmp_path / "trace.jsonl", []
    with EmbeddedStore(pool) as store:

        def sleep(_):
            waited.append(1)
            if len(waited) in (3, 5):
                put_chain(space_in(store), chain(f"prompt {len(waited)}", len(waited)))

        def live(self, chains, now_ns):
            if chains:
                add(self, chains, now_ns)
                raise KeyboardInterrupt

        add = Recording.add
        monkeypatch.setattr(record_.Recording, "add", live)
        monkeypatch.setattr(record_.time, "sleep", sleep)
        result = CliRunner().invoke(app, ["record", str(file), "--pool", str(pool), "--for", "120s"])
    assert result.exit_code == 0 and "begins after the first of them" in result.output, result.output
    assert [len(request.pages) for request in read_trace(file).requests] == [5]


def test_in_a_terminal_it_says_what_it_records_and_how_it_ends(pool, tmp_path):
    fill(pool)
    file, id = tmp_path / "r", namespace().digest.hex()[:8]
    with Terminal("record", str(file), "--pool", str(pool), "--for", "2h") as terminal:
        wait_for(lambda: "Ctrl-C ends it" in terminal.read() or terminal.process.poll() is not None)
        assert f"recording {id} (" in terminal.drawn and "for 2.0 h; Ctrl-C ends it and keeps" in terminal.drawn
        assert terminal.ends(signal.SIGINT) == 0
        assert f"0 requests in {file}" in terminal.drawn.replace("\r\n", "")


@pytest.mark.parametrize("more, said", [([], "nothing was recorded"), (["--json"], '"file": null')])
def test_ctrl_c_before_the_first_page_ends_it_as_well_as_later(pool, tmp_path, monkeypatch, more, said):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(record_.time, "sleep", interrupted)
    with EmbeddedStore(pool):
        result = CliRunner().invoke(app, ["record", str(tmp_path / "r"), "--pool", str(pool), *more])
    assert (result.exit_code, said in result.stdout, (tmp_path / "r").exists()) == (0, True, False)


def test_a_recording_that_cannot_be_written_does_not_wait_for_pages(pool, tmp_path):
    with EmbeddedStore(pool):
        result = CliRunner().invoke(app, ["record", str(tmp_path / "none" / "r"), "--pool", str(pool), "--for", "0.3s"])
    assert result.exit_code == 1 and "No such file or directory" in result.output and "begins" not in result.output


def test_a_recording_of_a_pool_that_stays_without_pages_says_so_and_leaves_no_file(pool, tmp_path):
    with EmbeddedStore(pool):
        result = CliRunner().invoke(app, ["record", str(tmp_path / "r"), "--pool", str(pool), "--for", "0.3s"])
    assert result.exit_code == 1 and "nothing was recorded: no engine" in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()


@as_root
def test_a_disk_that_is_full_ends_the_recording_and_what_was_written_can_be_read(pool, tmp_path, monkeypatch):
    fill(pool)
    disk = tmp_path / "disk"
    with mounted(disk, "size=64k"):
        file, added = disk / "trace.jsonl", []

        def live(self, chains, now_ns):
            added.append(1)
            many = tuple(range(1000 * len(added), 1000 * len(added) + 500))
            add(self, [UsedChain(now_ns, many, (0,) * 500)], now_ns + 10**12)

        add = Recording.add
        monkeypatch.setattr(record_.Recording, "add", live)
        monkeypatch.setattr(record_, "_LOOK_PERIOD_S", 0.001)
        result = CliRunner().invoke(app, ["record", str(file), "--pool", str(pool), "--for", "120s"])
        assert result.exit_code == 1 and "No space left on device" in result.output, result.output
        whole = file.read_bytes().count(b"\n") - 1
        assert f"the {whole:,} requests until then are in it" in " ".join(result.output.split())
        assert 0 < len(read_trace(file).requests) == whole < len(added)


@pytest.mark.parametrize("text", ["soon", "0s", "-1h", "1w"])
def test_a_time_that_is_none_is_refused(pool, tmp_path, text):
    fill(pool)
    result = CliRunner().invoke(app, ["record", str(tmp_path / "r"), "--pool", str(pool), "--for", text])
    assert result.exit_code == 2 and "90s, 30m" in " ".join(result.output.split())
