"""A folder behind the pool that answers late, never, with errors, or with what is not there or not the page."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from faults import GATE_S

from store_client.tiers.base import SpaceName, Target, TierError
from store_client.tiers.folder import SharedFolder

MOODS = ["late", "fails", "says_all", "gives_others", "mixes_seals", "gives_nothing"]
LATE_S = 0.05


class BadFolder:
    """Stands between the agents of this process and each shared folder.

    Args (attributes): `mood()` is asked at each call, "" for none; `struck` counts what it led to; calls of the kinds
    in `held` ("contains", "read") wait until they are released.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mood: Callable[[], str] = lambda: ""
        self.struck: Counter[str] = Counter()
        self.held: set[str] = set()
        self.waiting = threading.Event()
        self._gate = threading.Event()
        contains, read = SharedFolder.contains, SharedFolder.read

        def bad_contains(tier: SharedFolder, space: SpaceName, keys: Sequence[bytes], **more: Any) -> list[bool]:
            mood = self._suffer("contains")
            found = contains(tier, space, keys, **more)
            if mood == "says_all" and not all(found):
                self.struck[mood] += 1
                return [True] * len(keys)
            return found

        def bad_read(
            tier: SharedFolder, space: SpaceName, targets: Sequence[Target], **more: Any
        ) -> list[bytes | None]:
            mood = self._suffer("read")
            if mood in ("gives_others", "mixes_seals", "gives_nothing"):
                self.struck[mood] += 1
            if mood == "gives_nothing":
                return [None] * len(targets)
            if mood == "gives_others":
                keys = [target.key for target in targets]
                others = [*keys[1:], keys[0]] if len(keys) > 1 else [bytes(32)]
                return read(tier, space, [Target(key, one.pieces) for key, one in zip(others, targets, strict=True)],
                            **more)  # fmt: skip
            seals = read(tier, space, targets, **more)
            if mood == "mixes_seals":
                for target in targets:
                    target.pieces[0][0] ^= 1
                return [*seals[1:], seals[0]]
            return seals

        monkeypatch.setattr(SharedFolder, "contains", bad_contains)
        monkeypatch.setattr(SharedFolder, "read", bad_read)

    def release(self) -> None:
        self.held.clear()
        self._gate.set()

    def _suffer(self, call: str) -> str:
        if call in self.held:
            self.waiting.set()
            self._gate.wait(GATE_S)
        mood = self.mood()
        if mood == "late":
            self.struck[mood] += 1
            threading.Event().wait(LATE_S)
        elif mood == "fails":
            self.struck[mood] += 1
            raise TierError("injected", "unavailable")
        return mood
