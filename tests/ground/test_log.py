"""A fault that repeats is logged once per cause."""

import logging
import threading

import pytest
from causes import forget_causes

from mooncake_connector import log
from mooncake_connector.log import get_logger, kind_of, log_once, set_log_level


@pytest.fixture(autouse=True)
def fresh():
    forget_causes()
    yield
    forget_causes()


def test_each_cause_is_logged_once_and_again_when_it_was_forgotten(caplog):
    assert log_once("store.checksum", "page %d is damaged", 1)
    assert not log_once("store.checksum", "page %d is damaged", 2)
    log_once("another", "second")
    forget_causes()
    log_once("store.checksum", "again")
    assert caplog.messages == ["page 1 is damaged", "second", "again"]


def test_an_endless_stream_of_causes_stops(caplog):
    logged = sum(log_once(f"page-{i}", "lost") for i in range(5000))
    assert logged == 4096


def test_what_the_collector_of_cycles_ends_may_log_inside_of_this():
    def collected():
        with log._lock:
            log_once("ended", "an engine that nobody refers to was ended")

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(60.0)
    if hung := thread.is_alive():
        log._lock.release()  # for other tests
    assert not hung


def test_loggers_of_all_packages_obey_the_configured_level():
    try:
        set_log_level("ERROR")
        assert not get_logger("store_client.embedded").isEnabledFor(logging.WARNING)
        assert not get_logger("mooncake_connector.kv.identity.fingerprint").isEnabledFor(logging.WARNING)
        set_log_level("DEBUG")
        assert get_logger("store_client.embedded").isEnabledFor(logging.DEBUG)
    finally:
        logging.getLogger("mooncake_connector").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    "reason, kind",
    [
        ("connect call failed ('192.0.2.7', 9)", "connect call failed ("),
        ("no answer within 10.0 s (at '192.0.2.7', port 9)", "no answer within "),
        ("unknown field `what a stranger says`", "unknown field "),
        ("nothing that varies", "nothing that varies"),
        ("x" * 100, "x" * 80),
    ],
)
def test_reasons_that_differ_in_numbers_and_quotes_are_of_one_kind(reason, kind):
    assert kind_of(reason) == kind


def test_a_line_that_cannot_be_formatted_raises_nothing(caplog):
    get_logger("store_client.x").warning("%d pages are lost", "three")
    assert caplog.messages == ["%d pages are lost (TypeError in its arguments)"]
