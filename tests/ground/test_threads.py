"""Threads that nobody waits for; what the collector of cycles may call waits for no lock that it may be inside of."""

import logging
import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest

from mooncake_connector.threads import DaemonThreads, apart, done_apart


def test_what_needs_a_lock_of_who_calls_it_goes_on_when_that_is_free():
    lock, is_done, was_over = threading.Lock(), threading.Event(), []

    def work():
        with lock:
            is_done.set()

    def call():
        with lock:
            was_over.append(not wait([apart(work)], 0.1).not_done)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(60.0)
    assert was_over == [False] and is_done.wait(60.0)


def test_what_is_late_goes_on_and_is_logged_and_what_is_not_is_not(caplog):
    logger, go_on, is_done = logging.getLogger("test_threads"), threading.Event(), threading.Event()
    assert done_apart(bool, 60.0, "threads.test", "it takes longer than %g s", logger)
    assert not done_apart(lambda: go_on.wait(60) and is_done.set(), 0.05, "threads.test", "over %g s", logger, 40)
    go_on.set()
    assert is_done.wait(60.0)
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [(logging.ERROR, "over 0.05 s")]


def test_its_result_is_waited_for_and_its_thread_ends():
    thread = apart(threading.current_thread).result(60.0)
    assert thread is not threading.current_thread()
    thread.join(60.0)
    assert not thread.is_alive()


def test_what_it_raises_is_told():
    with pytest.raises(ValueError, match="invalid literal"):
        apart(int, "a").result(60.0)


def test_where_no_thread_can_be_started_it_is_done_all_the_same(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert apart(threading.current_thread).result(0) is threading.current_thread()


@pytest.mark.parametrize("cancels", [False, True])
def test_what_is_submitted_is_done_or_dropped_at_the_end(cancels):
    threads, is_begun, go_on, done = DaemonThreads(1, "t"), threading.Event(), threading.Event(), []
    begun = threads.submit(lambda: is_begun.set() or go_on.wait(60))
    waiting = threads.submit(done.append, 1)
    assert is_begun.wait(60)
    threads.shutdown(wait=False, cancel_futures=cancels)
    go_on.set()
    threads.shutdown()
    assert begun.result(0) and waiting.cancelled() == cancels and done == [1] * (not cancels)
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(bool)


def test_as_a_context_it_ends_like_any_executor():
    with DaemonThreads(2, "t") as threads:
        done = list(threads.map(str, range(5)))
    assert done == list("01234") and not any(thread.is_alive() for thread in threads._threads)


def test_a_process_ends_without_them():
    program = "import time; from mooncake_connector.threads import apart; apart(time.sleep, 600)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd="/")
