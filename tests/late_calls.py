"""Calls of channels as they are beside a busy Python thread."""

import itertools

import pytest

from transfer.transports import channel


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that does not wait comes back late, so every one after it waits."""
    monkeypatch.setattr(channel, "_LATE_S", -1.0)
    monkeypatch.setattr(channel, "_rests", itertools.count().__next__)
