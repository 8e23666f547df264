"""Run stages of the checks one after the other, and end with one line: `N passed, N failed, N skipped`.

    run.py STAGE...

A stage that fails does not stop the next one. Standard library only: this runs before anything of ours is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".cache" / "results"
DEV = ROOT / ".venv" / "bin"
VLLM, SGLANG = (ROOT / ".venvs" / engine / "bin" for engine in ("vllm", "sglang"))
VLLM_NEXT = ROOT / ".cache" / "vllm-0.33"
# What another version of vLLM can change: the interface, and what its scheduler makes of our answers.
NEXT_MODULES = (
    "surface", "events", "doctor", "sleep", "loads", "saves", "walk", "reset", "early", "multi",
    "pd_prefill", "pd_decode", "pd_reset",
)  # fmt: skip
NEEDS_SERVER = "test_the_server_ends_with_one_message"  # which has libraries that the older version does without


@dataclass(frozen=True, slots=True)
class Stage:
    """Commands that make up one stage. Each counts as one test, or as those in its JUnit report if pytest runs it.

    Args:
        variables: added to the environment.
        needs: a file without which the whole stage is skipped, and counts as one skipped test.
    """

    commands: Sequence[Sequence[str | Path]]
    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: Path | None = None


def pytest(where: Path, *arguments: str) -> tuple[str | Path, ...]:
    return (where / "pytest", "-q", *arguments)


STAGES = {
    "lint": Stage([(DEV / "ruff", "check", "."), (DEV / "mypy",)], limit_s=300),
    "fast": Stage([pytest(DEV, "-m", "not slow and not engine")], limit_s=600),
    "slow": Stage([pytest(DEV, "-m", "slow and not engine")], limit_s=1500),
    "vllm": Stage([pytest(VLLM, "tests/vllm")], limit_s=900),
    # No engine of it is started: its Python code finds 0.32's CPU extensions beside it (install_vllm_next.sh).
    "vllm-0.33": Stage(
        [pytest(VLLM, *(f"tests/vllm/test_{name}.py" for name in NEXT_MODULES), "-k", f"not {NEEDS_SERVER}")],
        limit_s=900,
        variables={
            "PYTHONPATH": str(VLLM_NEXT),
            "VLLM_TARGET_DEVICE": "cpu",
            # Each version would find the other's notes on models outdated, and look at every model again.
            "VLLM_CACHE_ROOT": str(VLLM_NEXT / ".vllm"),
        },
        needs=VLLM_NEXT / ".made",
    ),
    "sglang": Stage([pytest(SGLANG, "tests/sglang")], limit_s=900),
    "e2e": Stage([pytest(VLLM, "-v", "tests/e2e")], limit_s=4500),
    "long": Stage([pytest(DEV, "-v", "-m", "long"), pytest(VLLM, "-v", "-m", "long", "tests/e2e")], limit_s=14400),
}


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


def run_stage(name: str) -> Count:
    """Run all commands of a stage, whatever becomes of each."""
    count, stage = Count(), STAGES[name]
    if stage.needs is not None and not stage.needs.exists():
        print(f"SKIPPED: {name} as a whole: {stage.needs} is missing; `make setup` says why", flush=True)
        return Count(skipped=1)
    for index, command in enumerate(stage.commands):
        report = RESULTS / f"{name}-{index}.xml"
        report.unlink(missing_ok=True)
        is_pytest = Path(command[0]).name == "pytest"
        arguments = [str(part) for part in command] + ([f"--junit-xml={report}"] if is_pytest else [])
        status = run_command(arguments, stage.limit_s, stage.variables)
        outcome = read_report(report) if report.exists() else Count(passed=int(status == 0 and not is_pytest))
        if status != 0 and outcome.failed == 0:  # a crash, a time-out, no test collected, or a tool's complaint
            outcome.failed = 1
        count.add(outcome)
    return count


def run_command(arguments: Sequence[str], limit_s: float, variables: Mapping[str, str]) -> int:
    """Exit status of a command in a process group of its own, which is killed when it takes longer than `limit_s`."""
    environment = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}  # show each test when it ends, also into a pipe
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit_s:g} s: {' '.join(arguments)}", flush=True)
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # pytest's fixtures stop the servers they started
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def read_report(report: Path) -> Count:
    count = Count()
    for suite in ET.parse(report).getroot().iter("testsuite"):
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        count.add(Count(int(suite.get("tests", 0)) - failed - skipped, failed, skipped))
    return count


def main(names: Sequence[str]) -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    total = Count()
    for name in names:
        print(f"\n===== {name} =====", flush=True)
        started = time.monotonic()
        count = run_stage(name)
        total.add(count)
        print(f"===== {name}: {count} in {time.monotonic() - started:.0f} s", flush=True)
    (RESULTS / "summary.txt").write_text(f"{total}\n")
    print(total, flush=True)
    return 1 if total.failed else 0


if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in STAGES]
    if unknown or not sys.argv[1:]:
        sys.exit(f"run.py STAGE...: not known: {', '.join(unknown) or 'no stage given'}; there are {', '.join(STAGES)}")
    sys.exit(main(sys.argv[1:]))
