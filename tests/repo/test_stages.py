"""What runs the stages of `make test`: side by side, each shown as a whole, and a count that nothing is lost from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools import run

REPORT = '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>'
COUNTED = f"import sys; open(sys.argv[-1].partition('=')[2], 'w').write({REPORT!r}); sys.exit(1)"


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, run.Stage]:
    stages: dict[str, run.Stage] = {}
    monkeypatch.setattr(run, "STAGES", stages)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "AT_ONCE", 2)
    monkeypatch.setattr(run, "STOP_S", 1.0)
    monkeypatch.setattr(run, "ROOM", ((tmp_path, 0.0, 0.0, ""), (tmp_path / "missing", 1e9, 0.0, "")))
    return stages


def test_two_stages_run_side_by_side_and_each_is_shown_as_a_whole(stages, tmp_path, capfd):
    """Each waits for the other in its middle."""
    for name, other in (("one", "two"), ("two", "one")):
        waits = f"import os, time; print('{name} begins', flush=True); open(r'{tmp_path}/{name}', 'w').close()\n"
        waits += f"while not os.path.exists(r'{tmp_path}/{other}'): time.sleep(0.01)\nprint('{name} ends')"
        stages[name] = run.Stage([python(waits)], limit_s=60)
    assert run.main(["one", "two"]) == 0
    shown = capfd.readouterr().out
    for name in ("one", "two"):
        assert f"===== {name} =====\n{name} begins\n{name} ends\n===== {name}: 1 passed" in shown
    assert shown.endswith("2 passed, 0 failed, 0 skipped\n")
    assert (tmp_path / "summary.txt").read_text() == "2 passed, 0 failed, 0 skipped\n"


def test_a_stage_that_idles_runs_beside_as_many_as_there_are_cores_and_no_other_does(stages, tmp_path):
    """The first two end once the one that idles has begun, and begin before the last; one more that idles waits."""
    here = f"import os, time; names = lambda: os.listdir(r'{tmp_path}')\n"
    waits = here + "while 'idles' not in names(): time.sleep(0.01)\ntime.sleep(0.3)\nassert 'last' not in names()"
    for name in ("one", "two"):
        stages[name] = run.Stage([python(waits)], limit_s=60)
    stages["last"] = run.Stage([python(f"open(r'{tmp_path}/last', 'w').close()")], limit_s=60)
    alone = here + f"open(r'{tmp_path}/idles', 'w').close()\n"
    alone += "time.sleep(0.3)\nassert 'more' not in names()"
    stages["idles"] = run.Stage([python(alone)], limit_s=60, idles=True)
    stages["more"] = run.Stage([python(f"open(r'{tmp_path}/more', 'w').close()")], limit_s=60, idles=True)
    assert run.main(["one", "two", "last", "idles", "more"]) == 0


def test_every_way_to_fail_counts_and_stops_no_other_stage(stages, tmp_path, capfd):
    pytest_like = tmp_path / "pytest"
    pytest_like.write_text(f"#!{sys.executable}\n{COUNTED}\n")
    pytest_like.chmod(0o700)
    stages["fails and goes on"] = run.Stage([python("exit(3)"), python("print('second')")], limit_s=60)
    stages["takes too long"] = run.Stage([python("import time; print('x', flush=True); time.sleep(600)")], limit_s=0.5)
    stages["has a report"] = run.Stage([(pytest_like,)], limit_s=60)
    stages["lacks something"] = run.Stage([python("")], limit_s=60, needs=tmp_path / "missing")
    assert run.main(list(stages)) == 1
    shown = capfd.readouterr().out
    assert "second\n===== fails and goes on: 1 passed, 1 failed, 0 skipped" in shown
    assert "stopped after 0.5 s" in shown
    assert shown.endswith("\n3 passed, 4 failed, 2 skipped\n")


def test_one_stage_alone_prints_as_it_goes(stages, tmp_path, capfd):
    stages["alone"] = run.Stage([python("print('at once')")], limit_s=60)
    assert run.main(["alone"]) == 0
    assert not (tmp_path / "alone.log").exists() and "at once\n" in capfd.readouterr().out


FLAKY = """
import os, sys
report = next((a.partition("=")[2] for a in sys.argv if a.startswith("--junit-xml=")), None)
if report:
    open(report, "w").write({report!r})
    sys.exit(1)
asked = [a for a in sys.argv if "::" in a]
print("asked for", *asked)
sys.exit({status})
"""
CASES = (
    '<testsuites><testsuite tests="3" failures="1" errors="1" skipped="0">'
    '<testcase classname="tests.repo.test_stages" name="test_ok"/>'
    '<testcase classname="tests.repo.test_stages.TestIt" name="test_it[a.b-1]"><failure/></testcase>'
    '<testcase classname="tests.repo.test_stages.TestIt" name="test_it[a.b-1]"><error/></testcase>'
    "</testsuite></testsuites>"
)


@pytest.mark.parametrize(("status", "said"), [(0, "2 passed, 0 failed"), (1, "1 passed, 2 failed")])
def test_what_failed_runs_once_more_alone_and_is_listed(stages, tmp_path, capfd, status, said):
    pytest_like = tmp_path / "pytest"
    pytest_like.write_text(f"#!{sys.executable}\n{FLAKY.format(report=CASES, status=status)}\n")
    pytest_like.chmod(0o700)
    stages["flaky"] = run.Stage([(pytest_like,)], limit_s=60)
    assert run.main(["flaky"]) == status
    shown = capfd.readouterr().out
    test = "tests/repo/test_stages.py::TestIt::test_it[a.b-1]"
    assert f"asked for {test}\n" in shown and f"{said}, 0 skipped" in shown
    assert (f"FAILED ONCE, and passed alone: {test}\n" in shown) is (status == 0)


def test_many_failures_are_not_run_again(stages, tmp_path, capfd, monkeypatch):
    pytest_like = tmp_path / "pytest"
    pytest_like.write_text(f"#!{sys.executable}\n{FLAKY.format(report=CASES, status=0)}\n")
    pytest_like.chmod(0o700)
    monkeypatch.setattr(run, "MOST_AGAIN", 1)
    stages["broken"] = run.Stage([(pytest_like,)], limit_s=60)
    assert run.main(["broken"]) == 1
    assert "once more" not in capfd.readouterr().out


def test_without_room_nothing_is_run_and_the_folder_is_named(stages, tmp_path, capfd, monkeypatch):
    stages["one"] = run.Stage([python("print('it runs')")], limit_s=60)
    monkeypatch.setattr(run, "ROOM", ((tmp_path, 1e9, 0.0, "pools lie there"), (tmp_path, 0.0, 1.1, "so do files")))
    assert run.main(["one"]) == 1
    shown = capfd.readouterr().out
    assert "it runs" not in shown
    assert shown.endswith("free space there, and start again\n0 passed, 1 failed, 0 skipped\n")
    assert all(f"NO ROOM: {tmp_path} has " in line for line in shown.splitlines()[:2])
    assert "the tests need 1000000000.0: pools lie there\n" in shown and ": so do files\n" in shown
    assert (tmp_path / "summary.txt").read_text() == "0 passed, 1 failed, 0 skipped\n"


def test_what_fails_where_others_took_the_room_meanwhile_says_so(stages, tmp_path, capfd, monkeypatch):
    free = iter([[], ["NO ROOM: /full has 1.0 GiB free"]])
    monkeypatch.setattr(run, "lacks_room", lambda: next(free))
    stages["fails"] = run.Stage([python("exit(1)")], limit_s=60)
    assert run.main(["fails"]) == 1
    assert "===== fails: 0 passed, 1 failed, 0 skipped" in capfd.readouterr().out.partition("NO ROOM: /full")[0]
