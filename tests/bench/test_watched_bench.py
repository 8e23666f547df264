"""The benchmark of who looks at a server without vLLM: its rows, and whose processor time counts."""

import subprocess
import sys
import time

from bench.peers import watched
from bench.peers.watched import METRICS, NOBODY, TOP, Found, processor_s


def test_each_round_is_held_against_its_own_window_in_which_nobody_looks():
    """The machine was half as fast in the second and third round; only one of three rounds says 10 %."""
    found = {
        TOP: Found([0.101, 0.202, 0.220], [0.02], [0.5]),
        NOBODY: Found([0.100, 0.200, 0.200], [0.01], [0.4]),
        METRICS: Found([0.099, 0.200, 0.200], [0.01], [0.4]),
    }
    made = {one.figure: one for one in watched.rows(found)}
    assert round(made[f"{TOP}: processor time, change by it, median of rounds"].value, 6) == 1.0
    assert round(made[f"{TOP}: where 95 of 100 resampled medians lie, to"].value, 6) == 10.0
    assert round(made[f"{METRICS}: processor time, change by it, median of rounds"].value, 6) == 0.0
    assert made[f"{TOP}: processor time of the idle server, a second"].value == 20.0
    assert made[f"{TOP}: time to first token, p50"].limit == 400.0
    assert not any(one.figure.startswith(f"{NOBODY}: processor time, change") for one in made.values())


def test_processor_time_is_that_of_a_session_and_of_nobody_else():
    spins = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spins + 'time.sleep(60)'!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        end_s = time.monotonic() + 120
        while processor_s(process.pid) < 0.2:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        assert processor_s(other.pid) < 0.2
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=True)
        for one in (process, other):
            one.kill()
            one.wait()
