"""Who does not belong to a pair is refused with a cause, and nobody crashes of it."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from long_form import LONG

from e2e.pd_sglang.conftest import Asked, Pair
from e2e.pd_sglang.half_way import hands_over, is_refused
from e2e.pd_sglang.instances import Instance
from e2e.process import running


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="another secret is among the crashes; the others have a long form alone")
@pytest.mark.parametrize("difference", ["pages", "weights"])
def test_an_instance_that_does_not_fit_is_refused(
    pair: Pair, asked: Asked, misfit: Callable[[str], Instance], difference: str
) -> None:
    """By name; the pair serves on."""
    with running(misfit(difference)) as stranger:
        is_refused(pair, stranger, difference, asked["several"])


def test_junk_at_the_ports_changes_nothing(pair: Pair, asked: Asked) -> None:
    """From connections that are closed and some that stay. SGLang's bootstrap server logs what it cannot read."""
    with ExitStack() as stack:
        stack.enter_context(pair.prefill.provoked())
        for port in [pair.prefill.bootstrap_port, *(instance.directory_port for instance in pair.instances)] * 4:
            send_junk(port, stack)
        hands_over(pair, asked["several"])
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
