"""A streamed completion: bytes in, one answer out, or the reason why it is none."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

_LONGEST = 1 << 22
"""Bytes of one line; what is longer is no completion."""
_SHOWN = 300
_MOST_TOKENS = 1 << 40
"""A larger count is no count of tokens."""


class RequestFailed(Exception):
    """One call failed; the message says how. `status` is the server's, where it answered."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion. Token ids are there if the server sends them; the count if it reports its usage."""

    first_token_s: float
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int | None


class EventStream:
    """Server-sent events, in pieces of any size. Comments, event names and ids are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The data of the events that are complete now. Raises ValueError on a line without end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST:
            raise ValueError(f"a line of more than {_LONGEST >> 20} MiB")
        events = []
        for raw in lines:
            line = raw.rstrip(b"\r").decode(errors="replace")
            if not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
            elif line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
        return events

    def end(self) -> list[str]:
        """The event that had no empty line behind it when the connection closed."""
        return self.feed(b"\n\n")


class AnswerReader:
    """Puts the events of a completion together; `start` is when it was asked for."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._events = EventStream()
        self._first: float | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._usage: dict[str, Any] = {}
        self._finished = False

    def take(self, piece: bytes) -> None:
        self._take(self._events.feed(piece))

    def answer(self) -> Answer:
        self._take(self._events.end())
        if not self._finished:
            raise RequestFailed("the stream ended before the answer did")
        if self._first is None:
            raise RequestFailed("the answer is empty")
        count = self._usage.get("prompt_tokens")
        return Answer(
            first_token_s=self._first - self._start,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            prompt_tokens=count if isinstance(count, int) and 0 <= count <= _MOST_TOKENS else None,
        )

    def _take(self, events: list[str]) -> None:
        for data in events:
            if data == "[DONE]":
                self._finished = True
                continue
            event = json.loads(data)
            if not isinstance(event, dict):
                raise RequestFailed(f"sent an event that is no object: {_short(data)}")
            if event.get("error"):
                raise RequestFailed(f"failed while it answered: {error_text(data.encode())}")
            try:
                self._usage = {**self._usage, **(event.get("usage") or {})}
                for choice in event.get("choices") or ():
                    self._take_choice(choice)
            except (TypeError, AttributeError):
                raise RequestFailed(f"sent an event of no known form: {_short(data)}") from None

    def _take_choice(self, choice: dict[str, Any]) -> None:
        text, token_ids, reason = choice.get("text") or "", choice.get("token_ids") or (), choice.get("finish_reason")
        if text or token_ids or reason:  # the only token may be a part of a character: no text
            self._first = self._first or time.monotonic()
        self._text.append(text + "")
        self._token_ids.extend(token_ids)
        self._finished = self._finished or bool(reason)


def error_text(content: bytes) -> str:
    """What a server says in the body of an error, on one short line."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(content)
        inner = found.get("error") or found
        message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
        if isinstance(message, str):
            return _short(message)
    return _short(content.decode(errors="replace")) or "nothing"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in line)[:_SHOWN]
