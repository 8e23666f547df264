"""What a put holds between reserving space and publishing pages."""

from dataclasses import dataclass

from store_client.embedded.allocator import Piece
from store_client.embedded.ledger import Reservation


@dataclass(slots=True)
class Place:
    """Where one page of a put is being written."""

    index: int
    """Position in the caller's keys."""
    slot: int
    extents: list[Piece]
    checksum: int | None = None
    """None until its bytes are complete."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A reservation, the pages it is for, and what was met while reserving."""

    reservation: Reservation | None
    places: list[Place]
    present: list[int]
    failed: dict[int, str]
