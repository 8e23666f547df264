"""Log lines of the connector appear where vLLM's do, at the connector's own level."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mooncake_connector.config.schema import load_config
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
