"""What became of a page that a store does not have, as far as it remembers: an explanation, and no more than that."""

import enum
from typing import NamedTuple


class Lost(enum.Enum):
    """Why a store does not have a page that it had, or that it was given."""

    PRESSURE = "pressure"
    """Evicted: others needed its place."""
    SHRUNK = "shrunk"
    """Evicted: the store was made smaller."""
    REMOVED = "removed"
    CLEARED = "cleared"
    CORRUPT = "corrupt"
    FULL = "full"
    """Refused: no place could be made for it."""
    NO_SPACE = "no_space"
    """Refused: the file system is full."""
    BUSY = "busy"
    """Refused: the store was locked."""
    INDEX = "index"
    """Refused: the index had no room for its name."""
    ERROR = "error"
    """Refused: any other fault of the store."""

    @property
    def refused(self) -> bool:
        """Whether the page was never there."""
        return self in _REFUSALS


_REFUSALS = frozenset({Lost.FULL, Lost.NO_SPACE, Lost.BUSY, Lost.INDEX, Lost.ERROR})


class Known(enum.Enum):
    """What a store knows of a page."""

    STORED = "stored"
    GONE = "gone"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    """It was never stored, or that is long ago."""


class Fate(NamedTuple):
    """What became of one page, as far as a store remembers: an explanation, which may be wrong."""

    known: Known
    cause: Lost | None = None
    """Of a page that is gone or was refused."""
    ago_s: float = 0.0
    """Seconds since then."""
    unused_s: float = 0.0
    """For so long nobody had used a page that is gone."""


UNKNOWN = Fate(Known.UNKNOWN)
