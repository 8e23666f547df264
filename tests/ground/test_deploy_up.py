"""`mooncake-connector up` with stand-ins for engines: what it starts, restarts, tells, and that no process stays."""

from __future__ import annotations

import http.server
import json
import os
import random
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from long_form import LONG

from mooncake_connector.deploy import watch

pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).resolve().parents[1] / "stand_ins" / "deployed.py"
LIMIT_S = 120.0
QUICK = "import mooncake_connector.deploy.supervisor as s; s.BACKOFF_S = 0.05; s.STOP_S = 1.0\n"
QUICK += "from mooncake_connector.deploy import watch; watch.POLL_S = 0.1\n"
QUICK += "from mooncake_connector.cli.entry import main; main()"


def free_ports(count: int) -> list[int]:
    """Ports in a row, below those that Linux hands out to whoever asks for any."""
    while True:
        first = random.SystemRandom().randrange(10000, 22000)
        with suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return list(range(first, first + count))


class Up:
    """A running `up` of 2P1D, whose engine is the stand-in."""

    def __init__(self, folder: Path, pool: Path, *, flags: str = "", more: str = "", roles: str = "") -> None:
        self.mark = uuid.uuid4().hex
        self.ports = free_ports(3)
        model = folder / "m"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"x")
        server = folder / "engine" / "vllm" / "entrypoints" / "openai" / "api_server.py"
        server.parent.mkdir(parents=True)
        for package in (server.parents[2], server.parents[1], server.parent):
            (package / "__init__.py").write_text("")
        server.write_text(STAND_IN.read_text())
        info = folder / "engine" / "vllm-0.32.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
        self.file, self.logs = folder / "d.yaml", folder / "mooncake-logs"
        self.file.write_text(
            f"engine: vllm\nmodel: ./m\nflags: '{flags}'\nrouter: {{kind: none}}\n"
            f"prefill: {{count: 2, port: {self.ports[0]}}}\ndecode: {{port: {self.ports[2]}{roles}}}\n"
            f"connector: {{pool: {pool}, capacity: 2MiB}}\n{more}"
        )
        self.output = folder / "output"
        path = os.pathsep.join(filter(None, (str(folder / "engine"), os.environ.get("PYTHONPATH"))))
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", QUICK, "up", str(self.file)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, "MARK": self.mark}, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored where the tests run by nohup
            )  # fmt: skip

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str, times: int = 1) -> None:
        wait_until(lambda: self.text().count(words) >= times or self.ended(), f"{words!r} in\n{self.text()}")
        assert self.text().count(words) >= times, self.text()

    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self, index: int, status: int = 3) -> None:
        """Have an instance die: 0 and 1 prefill, 2 decodes."""
        with suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{self.ports[index]}/die/{status}", data=b"", timeout=30)

    def marked(self) -> set[int]:
        """Every process that came of this `up`, `up` included, in whatever session."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if f"MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.add(int(entry.name))
        return found

    def wait_until_all_run(self) -> None:
        """With `--child`: `up`, and for each instance a keeper, a server, its child and that one's."""
        wait_until(lambda: len(self.marked()) == 1 + 3 * 4, "all processes")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture
def up(tmp_path: Path, pool: Path) -> Iterator[Callable[..., Up]]:
    started = []

    def start(**options: str) -> Up:
        started.append(Up(tmp_path, pool, **options))
        return started[-1]

    yield start
    for one in started:
        for pid in one.marked():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.process.wait()


def test_it_checks_starts_tells_where_and_stops_all(up):
    run = up(flags="--child")
    run.wait_for("ready, for a router of yours")
    text = run.text()
    for name in ("prefill-0", "prefill-1", "decode-0"):
        assert f"{name} is started" in text and f"{name} is ready after" in text
        assert f"http://127.0.0.1:{run.ports[2]}" in text and (run.logs / f"{name}.log").exists()
    assert text.index("ok      ports") < text.index("prefill-0 is started")
    run.wait_until_all_run()
    assert run.stop() == 0 and run.marked() == set()
    assert "stopping" in run.text() and run.text().endswith("all processes have ended\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ways_to_end_it_stop_all_as_well(up, number):
    run = up(flags="--child --deaf")
    run.wait_for("ready, for a router of yours")
    assert run.stop(number) == 0 and run.marked() == set()


def test_a_second_time_stops_at_once(up):
    run = up(flags="--deaf")
    run.wait_for("ready, for a router of yours")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopping; once more to stop at once")
    assert run.stop() == 0 and run.marked() == set()


def test_nothing_is_started_where_a_check_fails(up):
    run = up(more="logs: ./m/config.json/logs\n")
    assert run.process.wait(LIMIT_S) == 1
    assert "failed  logs" in run.text() and "is started" not in run.text()


def test_an_instance_that_never_works_ends_everything_with_the_end_of_its_log(up):
    run = up(roles=", flags: --fails 7")
    assert run.process.wait(LIMIT_S) == 1 and run.marked() == set()
    assert re.search(r"error: decode-0 has ended with status 7 before it was ready.*", run.text())
    assert "    the reason why it fails" in run.text() and "all processes have ended" in run.text()


def test_an_instance_that_never_answers_is_given_up_at_the_deadline(up):
    run = up(roles=", flags: --silent", more="start_deadline_s: 3\n")
    assert run.process.wait(LIMIT_S) == 1 and run.marked() == set()
    assert "decode-0 has not answered /health within 3 s: it is ended" in run.text()


def test_few_at_a_time(up):
    run = up(more="start_at_once: 1\n")
    run.wait_for("ready, for a router of yours")
    events = re.findall(r"^(\S+-\d) is (started|ready)", run.text(), re.MULTILINE)
    assert events == [(name, what) for name in ("prefill-0", "prefill-1", "decode-0") for what in ("started", "ready")]
    run.stop()


def test_what_dies_is_restarted_and_given_up_after_the_fourth_time_while_others_go_on(up):
    run = up(flags="--child")
    run.wait_for("ready, for a router of yours")
    for times in (1, 2, 3):
        run.kill(0)
        run.wait_for(f"prefill-0 is started again (restart {times} of 3)")
        run.wait_for("prefill-0 is ready", times + 1)
    run.kill(0)
    run.wait_for("prefill-0 has ended with status 3, 4 times and never was well for 600 s in between")
    run.wait_for("it is given up, others go on")
    run.kill(2)
    run.wait_for("decode-0 is ready", 2)
    assert run.stop() == 0 and run.marked() == set()


def test_without_the_last_decode_instance_all_is_over(up):
    run = up()
    run.wait_for("ready, for a router of yours")
    for times in (1, 2, 3):
        run.kill(2)
        run.wait_for("decode-0 is ready", times + 1)
    run.kill(2)
    assert run.process.wait(LIMIT_S) == 1 and run.marked() == set()
    assert "error: decode-0 has ended with status 3, 4 times and never was well for 600 s" in run.text()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20 if LONG else 2))
def test_nothing_stays_when_it_is_killed_at_any_moment(up, seed):
    """kill -9 of `up` itself."""
    run = up(flags="--child" if seed % 2 else "--child --deaf")
    run.wait_for("prefill-0 is started" if seed else "ready, for a router")
    time.sleep(random.Random(seed).uniform(0, 1.5))
    run.process.kill()
    run.process.wait()
    wait_until(lambda: run.marked() == set(), "no process left")


def test_a_keeper_that_is_killed_takes_its_processes_along_and_is_replaced(up):
    run = up(flags="--child")
    run.wait_for("ready, for a router of yours")
    run.wait_until_all_run()
    keepers = [pid for pid in run.marked() if b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(keepers) == 3
    before = run.marked()
    os.kill(keepers[0], signal.SIGKILL)
    run.wait_for("and will be restarted")
    run.wait_for("is ready after", 4)
    assert len(before - run.marked()) == 4  # the keeper, its server, and both below
    assert run.stop() == 0 and run.marked() == set()


def test_what_runs_but_does_not_answer_is_killed_and_restarted(up):
    """Of prefill-0 the server stands still, of decode-0 its keeper too."""
    run = up(flags="--child", more="silence_deadline_s: 10\n")
    run.wait_for("ready, for a router of yours")
    run.wait_until_all_run()
    before = run.marked()
    for pid in before:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        is_keeper = b"keeper.py" in b" ".join(words)
        if str(run.ports[2]).encode() in words or (str(run.ports[0]).encode() in words and not is_keeper):
            os.kill(pid, signal.SIGSTOP)
    for name in ("prefill-0", "decode-0"):
        run.wait_for(f"{name} has not answered /health within 10 s: it is ended")
        run.wait_for(f"{name} is started again (restart 1 of 3)")
        run.wait_for(f"{name} is ready", 2)
    assert len(before - run.marked()) == 2 * 4  # each keeper, its server, and both below
    assert run.text().count("is started again") == 2
    assert run.stop() == 0 and run.marked() == set()


@pytest.mark.parametrize(
    "role, status, is_silent",
    [("router", 503, False), ("router", 0, True), ("decode", 503, True), ("decode", 200, False)],
)
def test_a_router_that_lacks_instances_is_no_silent_one(role, status, is_silent):
    from mooncake_connector.deploy.commands import Command
    from mooncake_connector.deploy.supervisor import Process, State

    class Told:
        latest = watch.Answer(time.monotonic(), status, None)

    process = Process(Command(role, role, ("x",), {}, "", ()), Path("x"), Told())  # type: ignore[arg-type]
    process.enter(State.READY)
    process.listen()
    assert (process.silent_s > 60) == is_silent and (process.state is State.SILENT) == is_silent


def test_figures_are_summed_over_labels():
    text = runpy.run_path(str(STAND_IN))["METRICS"]
    assert watch.figures_in(text, watch._OF_VLLM) == watch.Figures(
        running=3, waiting=2, done=11, hit_tokens=250, prompt_tokens=1000, moved_nbytes=1 << 20
    )


def test_a_metric_that_is_no_number_counts_nothing():
    found = watch.figures_in("vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n", watch._OF_VLLM)
    assert found.running == found.waiting == 0


@pytest.mark.parametrize("way", ["the reader has left", "the disk is full"])
def test_it_goes_on_where_its_words_cannot_be_written(way):
    program = "from mooncake_connector.cli.up_board import Board\nwith Board('vllm') as board:\n"
    program += "    board.say('x')\n    board.say('y')\nopen(2, 'w').write('done')"
    if way == "the disk is full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        read, out = os.pipe()
        os.close(read)
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    os.close(out)
    assert (run.returncode, run.stderr) == (0, "done")


def test_logs_that_somebody_has_removed_are_begun_anew(tmp_path):
    from mooncake_connector.deploy.commands import Command
    from mooncake_connector.deploy.supervisor import Process

    process = Process(Command("x", "decode", ("echo", "words"), {}, "", ()), tmp_path / "gone" / "x.log", None)  # type: ignore[arg-type]
    assert process.last_lines() == ["it cannot be read: No such file or directory"]
    process.start()
    assert process.keeper.wait(LIMIT_S) == 0  # its stdin stays open: at the end of that it would stop at once
    process.keeper.stdin.close()
    assert process.last_lines() == ["words"]


def test_the_table_has_a_row_for_each_process():
    from mooncake_connector.cli import up_board
    from mooncake_connector.deploy.commands import Command
    from mooncake_connector.deploy.supervisor import Process, State

    class Told:
        latest = watch.Answer(time.monotonic(), 200, watch.Figures(3, 2, 11, 250, 1000, 1 << 20))

    process = Process(Command("decode-0", "decode", ("x",), {}, "", ()), Path("x"), Told())  # type: ignore[arg-type]
    process.enter(State.READY)
    console = up_board.Console(width=100)
    with console.capture() as shown:
        console.print(up_board.table([process]))
    assert shown.get().splitlines()[1].split() == ["decode-0", "ready", "0", "s", "3", "2", "11", "25.0%", "1.0", "MiB"]


def test_the_curl_that_is_shown_is_what_a_shell_reads(monkeypatch):
    from mooncake_connector.cli import up_board
    from mooncake_connector.deploy.commands import Command

    monkeypatch.setattr(up_board, "model_of", lambda url: "it's $MODEL")
    made = [Command(name, name, ("x",), {}, f"http://{name}:1", ()) for name in ("prefill", "decode", "router")]
    text = up_board.welcome(made)
    assert "ready at http://router:1, until Ctrl-C" in text
    words = shlex.split(text[text.index("curl") :])
    assert words[:2] == ["curl", "http://router:1/v1/completions"]
    assert json.loads(words[-1])["model"] == "it's $MODEL"


def test_a_process_with_a_path_for_it_is_ready_once_that_answers():
    statuses = {"/readiness": 503, "/health": 200}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(statuses[self.path])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        asking = watch.Watch(f"http://127.0.0.1:{server.server_port}", None, "/readiness")
        try:
            wait_until(lambda: len(asked) > 1, "questions")
            assert not asking.latest.healthy and set(asked) == {"/readiness"}
            statuses["/readiness"] = 200
            wait_until(lambda: asking.latest.healthy, "readiness")
            statuses["/readiness"] = 503  # its instances are gone: it is alive all the same
            wait_until(lambda: asked[-2:] == ["/health", "/health"], "/health")
            assert asking.latest.healthy
        finally:
            asking.close()
            server.shutdown()
