"""What the collector of cycles may call waits for no lock that it may be inside of."""

import threading

from mooncake_connector.contain import apart


def test_what_needs_a_lock_of_who_calls_it_goes_on_when_that_is_free():
    lock, is_done, was_over = threading.Lock(), threading.Event(), []

    def work():
        with lock:
            is_done.set()

    def call():
        with lock:
            was_over.append(apart(work, 0.1))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(60.0)
    assert was_over == [False] and is_done.wait(60.0)


def test_it_is_waited_for():
    done = []
    assert apart(lambda: done.append(threading.current_thread()), 60.0)
    assert done != [threading.current_thread()]


def test_where_no_thread_can_be_started_it_is_done_all_the_same(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    assert apart(lambda: done.append(1), 60.0) and done == [1]
