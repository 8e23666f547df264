"""Run stages of the checks, and end with one line: `N passed, N failed, N skipped`.

    run.py STAGE...

Two stages run side by side where there are two cores, in the order given, so the longest are given first: a server
spends its start on one core, and most tests wait for something. One that waits for most of its time runs beside them,
one such at a time.
What such a stage prints is shown when it has ended. A stage that fails does not stop the others. Where a file system
has too little room for the tests nothing is run at all: they would fail in ways that say nothing of it.

Where a few tests failed they are run once more at the end, alone on the machine. What passes then counts as passed and
is listed as FAILED ONCE, since it is a defect all the same: of the test, or one that shows on a busy machine only.
Standard library only: this runs before anything of ours is imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".cache" / "results"
DEV = ROOT / ".venv" / "bin"
VLLM, SGLANG = (ROOT / ".venvs" / engine / "bin" for engine in ("vllm", "sglang"))
VLLM_NEXT = ROOT / ".cache" / "vllm-0.33"
TRITON = ROOT / ".cache" / "triton-3.6"
NEW_PYTHON, LOWEST = (ROOT / ".venvs" / name for name in ("python-3.12", "lowest"))
# What another version of vLLM can change: the interface, and what its scheduler makes of our answers.
NEXT_MODULES = (
    "surface", "events", "doctor", "sleep", "loads", "saves", "walk", "reset", "early", "multi",
    "pd_prefill", "pd_decode", "pd_reset",
)  # fmt: skip
# What another Python or another version of a package can change: the command line, what is read from outside (settings,
# messages), processes that fork, TLS, and one test of each kind of store, server and transfer.
PYTHON_MODULES = (
    "ground/test_cli.py", "ground/test_cli_store.py", "ground/test_config_hostile.py", "ground/test_threads.py",
    "ground/test_deploy_file.py", "ground/test_log.py", "store/test_conformance.py", "store/test_fork.py",
    "store/tiers/test_conformance.py", "agent/test_server.py", "agent/test_index_events.py",
    "transfer/test_handshake.py", "transfer/test_messages.py", "transfer/test_tls.py",
)  # fmt: skip
AT_ONCE = min(2, os.cpu_count() or 1)
STOP_S = 60.0
AGAIN_S = HANGS_S = 900.0
"""No test lasts so long, on a busy machine either: one that does hangs, and fails with what its threads were doing."""
MOST_AGAIN = 8
"""With more failures than that something is broken, and nothing is run again."""
ROOM = (
    (Path(tempfile.gettempdir()), 3.0, 0.05, "the disk tier writes there and leaves 5 % to others; set TMPDIR"),
    (ROOT, 1.0, 0.0, "logs and reports go there"),
    (Path("/dev/shm"), 2.0, 0.0, "pools lie there; in a container `--shm-size` makes it larger"),
)
"""Folder, GiB that the tests need there, the part of its file system that has to be free beside them, and why."""
NEEDS_SERVER = "test_the_server_ends_with_one_message"  # which has libraries that the older version does without
E2E_APART = ("pd", "pd_sglang", "deploy", "sglang")
"""Folders of tests/e2e that share no server with the rest, and run beside it."""
WALKS = "28-64-True or 12-48-32"  # the other two settings of test_walk.py are enough for the next version


@dataclass(frozen=True, slots=True)
class Stage:
    """Commands that make up one stage. Each counts as one test, or as those in its JUnit report if pytest runs it.

    Args:
        variables: added to the environment.
        limit_s: three times what it takes on two quiet cores, or more, so that a busy machine ends only what hangs.
        needs: a file without which the whole stage is skipped, and counts as one skipped test.
        idles: it waits for most of its time, for deadlines and processes that start, so that it takes nobody's core.
    """

    commands: Sequence[Sequence[str | Path]]
    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: Path | None = None
    idles: bool = False


def pytest(where: Path, *arguments: str, hangs_s: float = HANGS_S) -> tuple[str | Path, ...]:
    """`hangs_s`: see `HANGS_S`; 0 for tests that may last as long as they like."""
    limits = (f"--timeout={hangs_s:g}", "--timeout-method=signal")
    # pytest's own notes have one writer at a time.
    return (where / "pytest", "-q", "-p", "no:cacheprovider", *limits, *arguments)


TRANSFER = ("tests/transfer", "tests/repo", "tests/bench")  # about half of what needs no engine
RDMA = "tests/rdma"
TIERS = ("tests/tiers", "tests/agent", "tests/store/tiers")


def other_python(where: Path) -> Stage:
    """A sample of what needs no engine, in an environment that install_python.sh makes."""
    modules = [f"tests/{module}" for module in PYTHON_MODULES]
    return Stage(
        [pytest(where / "bin", "-m", "not slow and not engine", *modules)], limit_s=900, needs=where / ".made"
    )


STAGES = {
    "lint": Stage([(DEV / "ruff", "check", "."), (DEV / "mypy",)], limit_s=600),
    "transfer": Stage([pytest(DEV, "-m", "not slow and not engine", *TRANSFER)], limit_s=2400),
    "store": Stage(
        [pytest(DEV, "-m", "not slow and not engine", *(f"--ignore={folder}" for folder in (*TRANSFER, *TIERS, RDMA)))],
        limit_s=2400,
    ),
    "tiers": Stage([pytest(DEV, "-m", "not slow and not engine", *TIERS)], limit_s=2400),
    "rdma": Stage([pytest(DEV, "-v", "-s", RDMA, hangs_s=0)], limit_s=3000),
    "slow": Stage([pytest(DEV, "-m", "slow and not engine")], limit_s=2400, idles=True),
    "vllm": Stage([pytest(VLLM, "tests/vllm")], limit_s=2700),
    # No engine of it is started: its Python code finds 0.32's CPU extensions beside it (install_vllm_next.sh).
    "vllm-0.33": Stage(
        [
            pytest(
                VLLM, *(f"tests/vllm/test_{name}.py" for name in NEXT_MODULES), "-k", f"not ({NEEDS_SERVER} or {WALKS})"
            )
        ],
        limit_s=2700,
        variables={
            "PYTHONPATH": str(VLLM_NEXT),
            "VLLM_TARGET_DEVICE": "cpu",
            # Each version would find the other's notes on models outdated, and look at every model again.
            "VLLM_CACHE_ROOT": str(VLLM_NEXT / ".vllm"),
        },
        needs=VLLM_NEXT / ".made",
    ),
    # Its launcher is built against the driver's own library, so nothing is launched.
    "triton-3.6": Stage(
        [
            pytest(VLLM, "tests/vllm/test_device_kernel.py", "tests/vllm/test_device_digests.py", "-k", "not load"),
            pytest(SGLANG, "tests/sglang/test_device_kernels.py"),
        ],
        limit_s=600,
        variables={"PYTHONPATH": str(TRITON)},
        needs=TRITON / ".made",
    ),
    # tests/gpu where no GPU is, so that they go on fitting what they call (gpu/device.py).
    "gpu-stand-in": Stage([pytest(VLLM, "tests/gpu")], limit_s=900, variables={"TRITON_INTERPRET": "1"}),
    # The Python of engines' images, and on the oldest the lowest versions that pyproject.toml declares.
    "python-3.12": other_python(NEW_PYTHON),
    "lowest": other_python(LOWEST),
    "sglang": Stage([pytest(SGLANG, "tests/sglang")], limit_s=2700),
    "e2e": Stage(
        [pytest(VLLM, "-v", "tests/e2e", *(f"--ignore=tests/e2e/{name}" for name in E2E_APART))],
        limit_s=4500,
    ),
    "e2e-sglang": Stage([pytest(VLLM, "-v", "tests/e2e/sglang")], limit_s=2400),
    "sglang-pd": Stage([pytest(VLLM, "-v", "tests/e2e/pd_sglang", "tests/e2e/deploy")], limit_s=2400, idles=True),
    "pd": Stage([pytest(VLLM, "-v", "tests/e2e/pd")], limit_s=4500),
    "long": Stage(
        [
            pytest(DEV, "-v", "-m", "long", hangs_s=0),
            pytest(VLLM, "-v", "-m", "long", "tests/vllm", hangs_s=0),
            pytest(VLLM, "-v", "-m", "long", "tests/e2e", hangs_s=0),
        ],
        limit_s=14400,
    ),
}


@dataclass(frozen=True, slots=True)
class Failed:
    """A test of a stage that failed; `count` is what its report counts for it as failures and errors."""

    stage: Stage
    pytest: str | Path
    test: str
    count: int


@dataclass(slots=True)
class Count:
    """Outcomes so far."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def add(self, other: Count) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


class Run:
    """A stage under way: its commands one after the other, whatever becomes of each.

    Args:
        output: takes what the commands print; None leaves it to this process's own output.
    """

    def __init__(self, name: str, output: IO[bytes] | None) -> None:
        self.name, self.output, self.count = name, output, Count()
        self.started_s = time.monotonic()
        self.failed: list[Failed] = []
        self._stage, self._index = STAGES[name], 0
        self._process: subprocess.Popen[bytes] | None = None
        if self._stage.needs is None or self._stage.needs.exists():
            self._begin()
        else:
            self._say(f"SKIPPED: {name} as a whole: {self._stage.needs} is missing; `make setup` says why")
            self.count.skipped += 1

    def has_ended(self) -> bool:
        """Whether all commands have ended; begins the next one when one has."""
        while self._process is not None:
            status = self._process.poll()
            if status is None and time.monotonic() > self._deadline_s:
                self._say(f"stopped after {self._stage.limit_s:g} s: {' '.join(self._arguments)}")
                self.stop()
                status = 124
            if status is None:
                return False
            self._note(status)
            self._process, self._index = None, self._index + 1
            if self._index < len(self._stage.commands):
                self._begin()
        return True

    def stop(self) -> None:
        """End the command that runs, and all that it started."""
        if self._process is None or self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGINT)  # pytest's fixtures stop the servers they started
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _begin(self) -> None:
        command = self._stage.commands[self._index]
        self._report = RESULTS / f"{self.name}-{self._index}.xml"
        self._report.unlink(missing_ok=True)
        self._is_pytest = Path(command[0]).name == "pytest"
        self._arguments = [str(part) for part in command]
        self._arguments += [f"--junit-xml={self._report}"] if self._is_pytest else []
        self._deadline_s = time.monotonic() + self._stage.limit_s
        # Show each test when it ends, also into a pipe.
        environment = {**os.environ, **self._stage.variables, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            self._arguments, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=self.output, stderr=self.output and subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def _note(self, status: int) -> None:
        if self._report.exists():
            outcome = read_report(self._report)
        else:
            outcome = Count(passed=int(status == 0 and not self._is_pytest))
        if status == 1 and self._report.exists():
            where = self._stage.commands[self._index][0]
            self.failed += [Failed(self._stage, where, *found) for found in failed_tests(self._report).items()]
        if status != 0 and outcome.failed == 0:  # a crash, a time-out, no test collected, or a tool's complaint
            outcome.failed = 1
        self.count.add(outcome)

    def _say(self, text: str) -> None:
        if self.output is None:
            print(text, flush=True)
        else:
            self.output.write(f"{text}\n".encode())
            self.output.flush()


def read_report(report: Path) -> Count:
    """Outcomes in a JUnit report; one that ended in the middle is a failure."""
    count = Count()
    try:
        root = ET.parse(report).getroot()
    except ET.ParseError:
        return Count(failed=1)
    for suite in root.iter("testsuite"):
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        count.add(Count(int(suite.get("tests", 0)) - failed - skipped, failed, skipped))
    return count


def failed_tests(report: Path) -> dict[str, int]:
    """Of each test that failed the name by which pytest finds it, as far as there is one, and how often it counts."""
    found = dict[str, int]()
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("failure") is None and case.find("error") is None:
            continue
        module, classes = case.get("classname", "").split("."), list[str]()
        while module and not (ROOT / Path(*module)).with_suffix(".py").is_file():
            classes.insert(0, module.pop())
        if module:
            name = "::".join([f"{'/'.join(module)}.py", *classes, case.get("name", "")])
            found[name] = found.get(name, 0) + 1
    return found


def run_again(failed: Sequence[Failed], total: Count) -> None:
    """See the module; corrects the count."""
    for one in failed:
        command = [str(part) for part in (*pytest(Path(one.pytest).parent), one.test)]
        print(f"\n===== once more, alone: {one.test} =====", flush=True)
        try:
            environment = {**os.environ, **one.stage.variables, "PYTHONUNBUFFERED": "1"}
            ended = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, timeout=AGAIN_S)
        except subprocess.TimeoutExpired:
            continue
        if ended.returncode == 0:
            total.add(Count(passed=1, failed=-one.count))
            print(f"FAILED ONCE, and passed alone: {one.test}", flush=True)


def begin(name: str, *, alone: bool) -> Run:
    if alone:
        print(f"\n===== {name} =====", flush=True)
        return Run(name, None)
    log = RESULTS / f"{name}.log"
    print(f"----- {name} begins; {log} has what it prints until it ends", flush=True)
    return Run(name, open(log, "w+b"))


def has_core(name: str, running: Sequence[Run]) -> bool:
    """Whether a stage may begin beside these: where a core is left, or if it idles, where no other one does."""
    if AT_ONCE == 1:
        return not running
    alike = sum(STAGES[run.name].idles == STAGES[name].idles for run in running)
    return alike < (1 if STAGES[name].idles else AT_ONCE)


def show(run: Run) -> None:
    """What it printed, and how it ended."""
    if run.output is not None:
        print(f"\n===== {run.name} =====", flush=True)
        run.output.seek(0)
        shutil.copyfileobj(run.output, sys.stdout.buffer)
        sys.stdout.flush()
        run.output.close()
    print(f"===== {run.name}: {run.count} in {time.monotonic() - run.started_s:.0f} s", flush=True)


def lacks_room() -> list[str]:
    """Of each folder of `ROOM` where there is too little, what is there and what is needed."""
    said = []
    for folder, needed, share, why in ROOM:
        if not folder.is_dir():
            continue
        seen = os.statvfs(folder)
        free, kept = seen.f_bavail * seen.f_frsize / 2**30, share * seen.f_blocks * seen.f_frsize / 2**30
        if free < needed + kept:
            said.append(f"NO ROOM: {folder} has {free:.1f} GiB free, the tests need {needed + kept:.1f}: {why}")
    return said


def main(names: Sequence[str]) -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    if said := lacks_room():
        print("\n".join([*said, "free space there, and start again"]), flush=True)
        return conclude(Count(failed=1))
    total, waiting, running = Count(), list(names), list[Run]()
    alone = min(AT_ONCE, len(names)) == 1
    failed: list[Failed] = []
    try:
        while waiting or running:
            while name := next((name for name in waiting if has_core(name, running)), ""):
                waiting.remove(name)
                running.append(begin(name, alone=alone))
            for run in [run for run in running if run.has_ended()]:
                running.remove(run)
                total.add(run.count)
                failed += run.failed
                show(run)
                if run.count.failed and (said := lacks_room()):  # others may have taken it since the start
                    print("\n".join(said), flush=True)
            time.sleep(0.1)
    finally:
        for run in running:
            run.stop()
    if total.failed <= MOST_AGAIN:
        run_again(failed, total)
    return conclude(total)


def conclude(total: Count) -> int:
    (RESULTS / "summary.txt").write_text(f"{total}\n")
    print(total, flush=True)
    return 1 if total.failed else 0


if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in STAGES]
    if unknown or not sys.argv[1:]:
        sys.exit(f"run.py STAGE...: not known: {', '.join(unknown) or 'no stage given'}; there are {', '.join(STAGES)}")
    sys.exit(main(sys.argv[1:]))
