"""What a transaction of the ledger does to the page table, as a record that can be applied more than once."""

import struct
from dataclasses import dataclass, field

import numpy as np

from store_client.embedded.names import U8, U32, U64
from store_client.embedded.row import ROW_NBYTES

_HEAD = struct.Struct("<QQQQQQ")


def _empty(dtype: str) -> np.ndarray:
    return np.zeros(0, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Record:
    """A redo record: rows and cells to set and to clear, and the totals that hold afterwards.

    Plain values at plain places, committed with the transaction and applied right after. A writer killed in between
    leaves a record whose number the table has not seen; the next writer applies it again, which is harmless however far
    the first one came.
    """

    number: int
    pages: int
    used_granules: int
    set_cells: U64 = field(default_factory=lambda: _empty("<u8"))
    set_words: U64 = field(default_factory=lambda: _empty("<u8"))
    set_slots: U32 = field(default_factory=lambda: _empty("<u4"))
    set_rows: U8 = field(default_factory=lambda: np.zeros((0, ROW_NBYTES), dtype=np.uint8))
    clear_cells: U64 = field(default_factory=lambda: _empty("<u8"))
    clear_slots: U32 = field(default_factory=lambda: _empty("<u4"))

    def encode(self) -> bytes:
        head = _HEAD.pack(
            self.number, self.pages, self.used_granules,
            len(self.set_slots), len(self.clear_cells), len(self.clear_slots),
        )  # fmt: skip
        arrays = (
            self.set_cells.astype("<u8"), self.set_words.astype("<u8"), self.clear_cells.astype("<u8"),
            self.set_slots.astype("<u4"), self.clear_slots.astype("<u4"), self.set_rows,
        )  # fmt: skip
        return head + b"".join(array.tobytes() for array in arrays)

    @staticmethod
    def decode(blob: bytes) -> "Record":
        number, pages, used, num_set, num_cells, num_slots = _HEAD.unpack_from(blob)
        at = _HEAD.size
        parts = []
        counts = ((num_set, "<u8"), (num_set, "<u8"), (num_cells, "<u8"), (num_set, "<u4"), (num_slots, "<u4"))
        for count, dtype in counts:
            parts.append(np.frombuffer(blob, dtype=dtype, count=count, offset=at))
            at += parts[-1].nbytes
        rows = np.frombuffer(blob, dtype=np.uint8, count=num_set * ROW_NBYTES, offset=at).reshape(num_set, ROW_NBYTES)
        return Record(number, pages, used, parts[0], parts[1], parts[3], rows, parts[2], parts[4])
