"""Server-sent events, as completions are streamed: bytes in, the data of each event out."""

from __future__ import annotations

_LONGEST = 1 << 22
"""Bytes of one line; what is longer is no completion."""


class EventStream:
    """Takes what arrives in pieces of any size. Comments, event names and ids are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The events that are complete now. Raises ValueError on a line without end."""
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
