"""What `bench serve` makes of a server's stream: events, times, counts, and every way to fail."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from bench.streaming_server import StreamingServer, event, token, wait_until
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.answer import AnswerReader, EventStream, RequestFailed, error_text
from mooncake_connector.cli.bench.serve.client import completion, parse_url
from mooncake_connector.cli.bench.serve.load import CacheTokens, cache_tokens, percentile, run_pass

BODY = completion("m", [1, 2], 2)
LIMIT_S = 30.0


@pytest.fixture
def stand_in():
    with StreamingServer() as server:
        yield server


@pytest.fixture
def server(stand_in):
    return parse_url(stand_in.url, None)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_they_are_cut(size):
    content = b": a comment\n\nevent: x\ndata: one\r\n\r\ndata:two\ndata: lines\n\nid: 4\n\ndata: \xc3\xa9"
    stream = EventStream()
    events = [found for at in range(0, len(content), size) for found in stream.feed(content[at : at + size])]
    assert events == ["one", "two\nlines"]
    assert stream.end() == ["é"]


def test_a_line_without_end_is_not_collected_for_ever():
    stream = EventStream()
    with pytest.raises(ValueError, match="MiB"):
        for _ in range(10):
            stream.feed(b"x" * (1 << 20))


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 50), (0.9, 90), (0.99, 99), (0.991, 100), (1.0, 100)])
def test_a_percentile_is_a_value_that_was_measured(share, value):
    assert percentile(list(range(100, 0, -1)), share) == value


def test_percentiles_of_few_values():
    assert percentile([], 0.5) is None
    assert [percentile([3.0], share) for share in (0.5, 0.99)] == [3.0, 3.0]


def test_an_answer_has_its_text_tokens_and_usage(server, stand_in):
    answer = server.stream(BODY, LIMIT_S)
    assert (answer.text, answer.token_ids, answer.prompt_tokens) == ("ab", (1, 2), 260)
    assert answer.first_token_s > 0
    assert stand_in.behaviour.asked == [{**BODY, "stream": True}]


@pytest.mark.parametrize(
    ("events", "first"),
    [
        ([token(""), ": keep-alive\n\n", token("a", finish_reason="stop")], 2),
        ([token("", token_ids=[7]), token("a", finish_reason="stop")], 0),
        ([token(""), token("", finish_reason="length")], 1),
    ],
    ids=["an event without text, as some servers send at once", "an unfinished character", "nothing but the end"],
)
def test_the_first_token_is_the_first_that_says_something(events, first):
    begun = time.monotonic()
    reader, times = AnswerReader(begun), []
    for piece in events:
        times.append(time.monotonic() - begun)
        reader.take(piece.encode())
    times.append(time.monotonic() - begun)
    assert times[first] <= reader.answer().first_token_s <= times[first + 1]


def test_a_server_that_reports_no_usage_still_answers(server, stand_in):
    stand_in.behaviour.stream = [token("a", finish_reason="stop")]
    assert server.stream(BODY, LIMIT_S).prompt_tokens is None


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        ([token("a")], "ended before the answer did"),
        ([], "ended before the answer did"),
        (["data: [DONE]\n\n"], "the answer is empty"),
        (["data: {broken\n\n"], "JSONDecodeError"),
        (["data: [1]\n\n"], "no object"),
        ([event(choices=5)], "no known form"),
        ([event(choices=["a"])], "no known form"),
        ([event(choices=[{"text": 5}])], "no known form"),
        ([event(usage=[1])], "no known form"),
        ([event(usage=5)], "no known form"),
        ([f"data: {'[' * 100_000}\n\n"], "RecursionError"),
        ([f"data: {'9' * 10_000}\n\n"], "ValueError"),
        ([token("a"), event(error={"message": "the engine died"})], "failed while it answered: the engine died"),
    ],
)
def test_half_an_answer_is_a_failed_request(server, stand_in, stream, reason):
    stand_in.behaviour.stream = stream
    with pytest.raises(RequestFailed, match=reason):
        server.stream(BODY, LIMIT_S)


@pytest.mark.parametrize("count", ["9" * 4000, "-1", "1.5", '"many"', "{}"])
def test_a_count_that_is_none_is_left_out(server, stand_in, count):
    usage = f'data: {{"usage": {{"prompt_tokens": {count}}}}}\n\n'
    stand_in.behaviour.stream = [token("a", finish_reason="stop"), usage]
    assert server.stream(BODY, LIMIT_S).prompt_tokens is None


@pytest.mark.parametrize("status", [400, 401, 404, 500, 503])
def test_an_error_is_told_with_what_the_server_said(server, stand_in, status):
    stand_in.behaviour.status = status
    with pytest.raises(RequestFailed, match=f"answered {status}: <h1>Out of order</h1>") as caught:
        server.stream(BODY, LIMIT_S)
    assert caught.value.status == status


def test_a_page_is_no_stream(server, stand_in):
    stand_in.behaviour.kind = "text/html"
    with pytest.raises(RequestFailed, match="text/html instead of a stream"):
        server.stream(BODY, LIMIT_S)


def test_a_server_that_stops_in_the_middle_of_an_answer_ends_at_the_deadline(server, stand_in):
    stand_in.behaviour.stream, stand_in.behaviour.pause_s = [token("a"), token("b")], 600
    with pytest.raises(RequestFailed, match="in time"):
        server.stream(BODY, 0.3)


def test_a_server_that_drips_ends_at_the_deadline(server, stand_in):
    """Each piece comes soon after the one before it, the answer never does."""
    stand_in.behaviour.stream, stand_in.behaviour.pause_s = [": still here\n\n"] * 10_000, 0.02
    with pytest.raises(RequestFailed, match="in time"):
        server.stream(BODY, 0.5)


@pytest.mark.parametrize("path", ["answer", "page"])
def test_headers_that_drip_end_at_the_deadline(path):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            connected, _ = listener.accept()
            with connected, contextlib.suppress(OSError):
                connected.sendall(b"HTTP/1.1 200 OK\r\n")
                while True:
                    connected.sendall(b"X: 1\r\n")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        server = parse_url(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        with pytest.raises(RequestFailed, match="in time"):
            server.stream(BODY, 0.5) if path == "answer" else server.get("/v1/models", 0.5)
        thread.join()


def test_the_deadline_counts_from_the_first_attempt_to_connect(monkeypatch):
    """Not anew for each address of a name, nor for what comes after the connection."""
    tried = []

    class Addresses(list):
        def __iter__(self):
            for item in super().__iter__():
                tried.append(item)
                yield item

    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as stack:
        address = silent.getsockname()
        for _ in range(4):  # its queue is full: more are left without an answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        one = (socket.AF_INET, socket.SOCK_STREAM, 0, "", address)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: Addresses([one] * 1000))
        with pytest.raises(RequestFailed, match="in time"):
            parse_url("http://name:1", None).stream(BODY, 0.3)
    assert len(tried) < 1000


def test_nothing_is_sent_after_the_deadline(server, stand_in, monkeypatch):
    """A name may be looked up for longer; a server is not to work for an answer that nobody waits for."""
    resolved, lookup, before = threading.Event(), socket.getaddrinfo, set(threading.enumerate())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: resolved.wait(LIMIT_S) and lookup(*given, **more))
    with pytest.raises(RequestFailed, match="in time"):
        server.stream(BODY, 0.2)
    (left,) = set(threading.enumerate()) - before
    resolved.set()
    left.join(LIMIT_S)
    assert not left.is_alive() and stand_in.behaviour.asked == []


def test_a_handshake_that_never_ends_ends_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RequestFailed, match="in time"):
        parse_url(f"https://127.0.0.1:{silent.getsockname()[1]}", None).stream(BODY, 0.3)


def test_nobody_listens():
    with socket.socket() as taken, pytest.raises(RequestFailed, match="ConnectionRefusedError"):
        taken.bind(("127.0.0.1", 0))
        parse_url(f"http://127.0.0.1:{taken.getsockname()[1]}", None).stream(BODY, LIMIT_S)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "not here"}', "not here"),
        (b'{"detail": "Unauthorized"}', "Unauthorized"),
        (b"<html>\n  oops</html>", "<html> oops</html>"),
        (b"\x1b[31mred\x1b[0m", "?[31mred?[0m"),
        (b"", "nothing"),
        (b"[1, 2]", "[1, 2]"),
        (b"[" * 100_000, "[" * 300),
    ],
)
def test_what_an_error_says_fits_on_a_line_and_moves_no_cursor(content, text):
    assert error_text(content) == text


def test_requests_are_sent_a_fixed_number_at_a_time(server, stand_in):
    together = threading.Barrier(3, timeout=60)

    def ask(prompt):
        together.wait()  # three are under way, or this never ends
        return server.stream(completion("m", prompt, 2), LIMIT_S)

    done = run_pass(server, ask, [[i] for i in range(9)], 3)
    assert stand_in.behaviour.most_at_once <= 3
    assert sorted(body["prompt"] for body in stand_in.behaviour.asked) == [[i] for i in range(9)]
    assert done.failed == 0 and len(done.answers) == 9 and done.per_second == pytest.approx(9 / done.seconds)


def test_failed_requests_are_counted_and_not_fast(server, stand_in):
    def ask(prompt):
        if prompt[0] % 2:
            raise RequestFailed(f"no {prompt[0]}")
        return server.stream(BODY, LIMIT_S)

    done = run_pass(server, ask, [[index] for index in range(8)], 1)
    assert (done.failed, done.reason) == (4, "no 1")
    assert [answer is None for answer in done.answers] == [False, True] * 4
    assert done.per_second == pytest.approx(4 / done.seconds)


def test_a_server_that_died_is_not_asked_for_ever(server, stand_in):
    stand_in.behaviour.status = 500
    done = run_pass(server, lambda prompt: server.stream(BODY, LIMIT_S), [[0]] * 1000, 2)
    assert done.failed == 1000 and done.per_second == 0
    assert len(stand_in.behaviour.asked) <= 6


def test_after_ctrl_c_nothing_more_is_asked(server, stand_in, monkeypatch):
    stand_in.behaviour.pause_s = 600
    join, asking = threading.Thread.join, []

    def interrupted(thread, timeout=None):
        wait_until(lambda: len(stand_in.behaviour.asked) == 2)
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    def ask(prompt):
        asking.append(threading.current_thread())
        return server.stream(BODY, 600)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_pass(server, ask, [[0]] * 50, 2)
    stand_in.behaviour.ended.set()
    for thread in asking:
        thread.join(60)
    assert len(asking) == 2 and not any(thread.is_alive() for thread in asking)


METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 20.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 1.5e+03
"""


def test_tokens_are_counted_by_source_over_all_engines(server, stand_in):
    stand_in.behaviour.metrics = METRICS
    assert cache_tokens(server) == CacheTokens(computed=15, engine_cache=20, connector=1500)


INFINITE = 'vllm:prompt_tokens_by_source_total{source="local_compute"} +Inf\n'


@pytest.mark.parametrize(
    "metrics", [None, "", "other_total 3\n", "<html>not metrics</html>\n", "a{b=} 1\n", INFINITE], ids=repr
)
def test_a_server_without_these_counters_has_none(server, stand_in, metrics):
    stand_in.behaviour.metrics = metrics
    assert cache_tokens(server) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8000", "http://h:8000"),
        ("h:8000", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h/base/v1/completions", "https://h:443/base"),
        ("http://[::1]:80/v1", "http://[::1]:80"),
    ],
)
def test_addresses_of_a_server(url, expected):
    assert parse_url(url, None).url == expected


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://h", "http://", "http://h:port", "http://h:99999", "http://me:secret@h"),
        *("http://me:secret@h:port", "http://me:secret@[::1", "http://[::1", "http://exa mple", "http://h/a b"),
    ],
)
def test_what_is_no_address_is_refused_without_a_secret_in_the_message(url):
    with pytest.raises(BenchError) as caught:
        parse_url(url, None)
    assert "secret" not in str(caught.value)


def test_the_key_is_in_no_representation():
    assert "hidden" not in repr(parse_url("http://h", "hidden"))
