"""`mooncake-connector up` with real engines and each router: it answers as one engine does, mends itself, and ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from long_form import LONG

from e2e.demo import TEXT, chat
from e2e.deploy.deployments import LIMIT_S, ROUTERS, Deployed, Request, Way

pytestmark = pytest.mark.long
WAYS = [
    Way("sglang", 1, "kind: sglang-router"),
    Way("sglang", 1, "kind: builtin"),
    Way("vllm", 2, "kind: vllm-router"),
    Way("vllm", 2, "kind: builtin"),
    Way("vllm", 2, "kind: builtin, order: concurrent"),
]


def said(number: int) -> str:
    return f"{TEXT[700 * number : 700 * number + 1400]}\n\nIn one sentence: what is this about?"


def request(number: int, text: str, *, is_chat: bool = False, stream: bool = False) -> Request:
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 8, "stream": stream}
    if is_chat:
        messages = [{"role": "user", "content": said(number)}]
        return Request("/v1/chat/completions", {**body, "messages": messages}, text)
    return Request("/v1/completions", {**body, "prompt": chat(said(number))}, text)


# Texts are those of transformers alone in float32, where every token is ahead of the next best one by 0.06 nats at
# least. Each prompt has about 300 tokens.
REQUESTS = [
    request(0, "This document is about the legal rights and"),
    request(1, "This definition outlines the rights and obligations of", is_chat=True),
    request(4, "This section provides a license to the Lic", stream=True),
    request(5, "This is a legal document that outlines the", is_chat=True, stream=True),
]
KV_NBYTES = len(REQUESTS) * 256 * 2 * 30 * 3 * 64 * 4
"""What is handed over for the whole pages of all at least: keys and values of 30 layers with 3 heads of 64 floats."""


@pytest.fixture(scope="module", params=WAYS if LONG else WAYS[:1], ids=str)
def deployed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, logs: Path
) -> Iterator[Deployed]:
    way: Way = request.param
    if way.is_of_others and not (ROUTERS / ".installed").exists():
        pytest.skip("NOT TESTED: the routers could not be installed (`make routers`)")
    found = Deployed(way, tmp_path_factory.mktemp("up"), logs / f"up-{way}")
    checked = found.check()
    assert checked.returncode == 0 and "failed" not in checked.stdout, checked.stdout + checked.stderr
    try:
        found.start()
        found.wait_until_it_answers(REQUESTS[0])  # a router of others takes its instances in after it answers /health
        yield found
    finally:
        found.stop()


def test_answers_are_those_of_one_engine_and_kv_moves_for_each(deployed: Deployed) -> None:
    """Completions and chats, whole and streamed; what is moved is counted where `up` shows it."""
    assert [deployed.answer(one) for one in REQUESTS] == [one.text for one in REQUESTS]
    for role in ("prefill", "decode"):
        deployed.wait_until_moved(role, KV_NBYTES)


def test_several_at_once(deployed: Deployed) -> None:
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        assert list(threads.map(deployed.answer, REQUESTS)) == [one.text for one in REQUESTS]


@pytest.mark.skipif(not LONG, reason="an instance starts again (`make test-long`)")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_decode_instance_that_is_lost_is_replaced(deployed: Deployed, number: signal.Signals) -> None:
    times = deployed.printed().count("decode-0 is ready")
    before = deployed.decode_server()
    before.send_signal(number)
    deployed.wait_for("decode-0 is ready", times=times + 1, within_s=2 * LIMIT_S)
    assert not before.is_running() and deployed.decode_server().pid != before.pid
    for one in REQUESTS:
        assert deployed.wait_until_it_answers(one) == one.text
    deployed.wait_until_moved("decode", KV_NBYTES)


def test_ctrl_c_leaves_no_process(deployed: Deployed) -> None:
    """The last test: nothing is asked afterwards."""
    processes = deployed.processes()
    assert len(processes) > 2 * (deployed.way.num_prefills + 2)  # a keeper, a server, and what engines start
    assert deployed.stop() == 0
    assert [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert deployed.printed().endswith("all processes have ended\n")
