"""The scheduler side: which weights the engine computes with, and so what names the pages that it reads and stores.

Whenever the weights may have become others (:mod:`vllm_plugin.weights.calls`), nothing is named until all workers have
read theirs, in the first later step that computes something or that a request waits for. Equal ones have the name of
before; others have one of their own, which is that of every instance with the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mooncake_connector.kv.namespace import private_model_digest
from mooncake_connector.log import get_logger
from vllm_plugin.weights.reading import Reading, merged
from vllm_plugin.weights.worker import read_weights

_STEPS = 16
"""The workers answer with the step that asks; at most so many later it has failed."""
_PATIENCE_S = 1.0
"""How long requests are put aside until the workers have answered. After that they are computed."""

Run = Callable[[Callable[[object], Reading | None]], list[Reading | None]]
"""Calls a function with vLLM's worker on each rank, one step or call after the other, and gives what it returns."""

logger = get_logger(__name__)


class WeightsInMemory:
    """See the module.

    Args:
        num_ranks: of the instance.
        named: gives a reading's digest.
    """

    def __init__(self, num_ranks: int, named: Callable[[Reading], str]) -> None:
        self._num_ranks, self._named = num_ranks, named
        self.name: str | None = None
        """What stands for the weights in place of the model's digest; None while they are those of the files."""
        self.unknown = False
        """Whether they may be others than `name` says: nothing is read or stored."""
        self.taints = False
        """Whether vLLM's own cache may have KV of former weights: what hangs on it has no name."""
        self._read_once = False
        self._files: Reading | None = None
        """Weights as they were loaded; None where they could not be read."""
        self._now: Reading | None = None
        """What `name` stands for."""
        self._number = 0
        self._asked, self._steps, self._heard = False, 0, list[Reading | None]()
        self._computed = False
        """Whether a step has computed something while they were unknown."""
        self._others = False
        """Whether a step may have computed with weights that are neither those of before nor those of now."""
        self._emptied = False
        """Whether vLLM's own cache was emptied after what was computed with former weights."""
        self._patient_until_s: float | None = None
        self._waits = False

    @property
    def watched(self) -> bool:
        """Whether the workers can read their weights, and every change of them is known here."""
        return self._files is not None

    def remember(self, run: Run) -> None:
        """Have the workers read their weights before anything changes them for the first time."""
        if self._read_once:
            return
        self._read_once = True
        started_s = time.monotonic()
        whole = merged(run(read_weights), self._num_ranks)
        if whole is None or whole.cause:
            cause = "a worker did not answer" if whole is None else whole.cause
            said = "the weights in memory cannot be read (%s): after a reset or an update this instance shares no pages"
            logger.warning(said, cause)
            return
        self._files = self._now = whole
        took_s = time.monotonic() - started_s
        logger.info("the weights in memory were read in %.2f s, before a call that may change them", took_s)

    def may_be_others(self) -> None:
        """From the next step on the engine may compute with other weights."""
        self._others = self._others or (self.unknown and self._computed)
        self._emptied = self._emptied and self.unknown and not self._computed
        self.unknown, self._computed = True, False
        self._number += 1
        self._asked, self._heard, self._patient_until_s = False, [], None

    def make_private(self) -> None:
        """They cannot be read: nobody else's are known to be the same."""
        self._files = self._now = None
        self.unknown, self.name = False, private_model_digest()

    def own_cache_emptied(self) -> None:
        """vLLM has forgotten all KV of its own."""
        if self.unknown:
            self._emptied, self._others, self._computed = True, False, False
        else:
            self.taints = False

    def is_worth_a_wait(self) -> bool:
        """Whether a request is put aside until the weights are known: in a step or two, for a second at most."""
        if not self.unknown:
            return False
        now_s = time.monotonic()
        if self._patient_until_s is None:
            self._patient_until_s = now_s + _PATIENCE_S
        self._waits = now_s < self._patient_until_s
        return self._waits

    def ask(self, *, computes: bool) -> int:
        """What is asked of the workers in the step that is being planned; 0 for nothing.

        A step that neither computes anything nor is waited for may lie before an update: the engine is paused.
        """
        waits, self._waits = self._waits, False
        if not self.unknown:
            return 0
        self._computed = self._computed or computes
        if self._asked:
            self._steps += 1
            return 0
        if not computes and not waits:
            return 0
        self._asked, self._steps = True, 0
        return self._number

    def heard(self, reading: Reading | None) -> bool:
        """Take in what workers say in a step. Whether the weights are known from now on, and are others than before."""
        if not self.unknown:
            return False
        if reading is not None and reading.number == self._number:
            self._heard.append(reading)
        whole = merged(self._heard, self._num_ranks)
        if whole is None:
            if self._steps < _STEPS:
                return False
            whole = Reading(self._number, cause="a worker did not answer")
        others = self._others or self._now is None or whole.weights != self._now.weights
        self.taints = not self._emptied and (self.taints or others)
        self._others, self._emptied = False, False
        if whole.cause or self._files is None:
            logger.warning("the weights in memory cannot be read (%s): this instance shares no pages", whole.cause)
            self.make_private()
            return True
        self.unknown, self._now = False, whole
        name = None if whole.weights == self._files.weights else self._named(whole)
        if name != self.name:
            same = "those of the model's files again" if name is None else f"others: their pages are those of {name}"
            logger.info("the weights in memory are %s", same)
        self.name = name
        return others
