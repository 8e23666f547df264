"""Who does not belong to a pair is refused with a cause, and nobody crashes of it."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from long_form import LONG

from e2e.pd_sglang.conftest import COMMON, Asked, Pair, make_secret, reached
from e2e.pd_sglang.instances import Both, Instance
from e2e.process import running
from models import checkpoint

CAUSES = {"secret": "secret", "pages": "page size", "weights": "model"}
"""What is different in a decode instance, and what its answer says of it."""


@pytest.mark.long
@pytest.mark.parametrize("difference", CAUSES if LONG else ["secret"])
def test_an_instance_that_does_not_fit_is_refused(
    pair: Pair, asked: Asked, qwen3: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory, difference: str
) -> None:
    """By name; the pair serves on."""
    is_secret = difference == "secret"
    stranger = Instance(
        checkpoint("qwen3-other") if difference == "weights" else qwen3,
        "decode",
        log=logs / f"pd-sglang-{difference}.log",
        config=reached(make_secret(tmp_path_factory, "another one, but long enough") if is_secret else pair.secret),
        args=[*COMMON, *(("--page-size", "32") if difference == "pages" else ())],
    )
    question = asked["several"]
    with running(stranger), ThreadPoolExecutor(4) as threads:  # prefill waits a lease for the stranger
        failure = Both(threads, pair.prefill, stranger, question.prompt, 4).failure()
        assert CAUSES[difference] in failure, failure
        both = Both(threads, *pair.instances, question.prompt, len(question.answer))
        assert both.answer() == question.answer
        for instance in (stranger, *pair.instances):
            instance.holds_nothing()
    assert not stranger.complaints(), "exceptions in the log:\n" + "\n".join(stranger.complaints()[:20])


@pytest.mark.parametrize("where", ["bootstrap server", "directories"])
def test_junk_at_the_ports_changes_nothing(pair: Pair, asked: Asked, where: str) -> None:
    """From connections that are closed and some that stay. SGLang's bootstrap server logs what it cannot read."""
    with ExitStack() as stack:
        if where == "bootstrap server":
            stack.enter_context(pair.prefill.provoked())
            ports = [pair.prefill.bootstrap_port]
        else:
            ports = [pair.prefill.directory_port, pair.decode.directory_port]
        for port in ports * 4:
            send_junk(port, stack)
        question = asked["several"]
        with ThreadPoolExecutor(2) as threads:
            both = Both(threads, *pair.instances, question.prompt, len(question.answer))
            assert both.answer() == question.answer
        for instance in pair.instances:
            instance.holds_nothing()


def send_junk(port: int, stack: ExitStack) -> None:
    """Connections that `stack` closes, unless they are closed at once."""
    source = random.Random(port)
    http = b'PUT /route HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n["role": '
    junk = [b"", source.randbytes(source.randrange(1, 5000)), b"\xff" * 64, http, http.replace(b"PUT", b"GET")]
    for sent in junk:
        stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        with suppress(OSError):
            stranger.sendall(sent)
        if source.random() < 0.5:
            stranger.close()
