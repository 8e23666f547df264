"""Log lines of the connector appear where vLLM's do, at the connector's own level."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from cases import Start

from mooncake_connector.config.sources import load_config
from mooncake_connector.log import ROOT_LOGGER
from vllm_plugin.connector import _log_like_vllm


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def kept() -> Iterator[Kept]:
    """A handler of vLLM's, which takes what is INFO or above."""
    handler, theirs, ours = Kept(), logging.getLogger("vllm"), logging.getLogger(ROOT_LOGGER)
    before = ours.handlers[:], ours.level, ours.propagate
    ours.handlers.clear()
    theirs.addHandler(handler)
    yield handler
    theirs.removeHandler(handler)
    ours.handlers[:], ours.level, ours.propagate = before


@pytest.mark.parametrize(("level", "lines"), [("DEBUG", ["fine", "coarse"]), ("INFO", ["coarse"]), ("WARNING", [])])
def test_the_level_is_the_one_that_is_configured(kept: Kept, level: str, lines: list[str]) -> None:
    for _ in range(2):  # once in the scheduler's role, once in a worker's
        _log_like_vllm(load_config({"log_level": level}, {}))
    logger = logging.getLogger(f"{ROOT_LOGGER}.transfer.shell")
    logger.debug("fine")
    logger.info("coarse")
    assert kept.lines == lines
    assert kept.level == logging.INFO


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (1024, "the pool holds 32,768 tokens of this model in 1.0 MiB, vLLM's own KV cache 16,384"),
        (4096, "vLLM's own KV cache 65,536: what that drops is often gone here too; `capacity` should be 4.0 MiB"),
    ],
)
def test_start_up_says_how_many_tokens_the_pool_holds(
    start: Start, caplog: pytest.LogCaptureFixture, blocks: int, said: str
) -> None:
    with caplog.at_level(logging.INFO, ROOT_LOGGER):
        engine = start(num_blocks=blocks, extra={"capacity": "1MiB"})
        engine.shut_down()  # joins the thread that opens the pool
    assert caplog.text.count(said) == 1
