"""Servers whose transfers a test spoils or stops while they run: the test's side of `faults/pd_faults.py`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PLUGIN", "Faulty"]

PLUGIN = Path(__file__).parent / "faults"
"""What has to be on the PYTHONPATH of such a server."""


class Faulty:
    """The files for a server's faults lie in a folder beside its log."""

    def __init__(self, log: Path) -> None:
        self.faults = log.with_suffix(".faults")
        self.faults.mkdir(parents=True, exist_ok=True)
        self.fault_variables = {"PD_FAULTS": str(self.faults)}
        self.heal()

    def fault(self, kind: str, value: str = "") -> None:
        """Begin a fault of this instance; the plugin has the kinds."""
        (self.faults / kind).write_text(value)

    def heal(self) -> None:
        """End all faults, and forget what was seen of them."""
        for file in self.faults.iterdir():
            file.unlink()

    def saw(self, event: str) -> bool:
        """Whether a fault has had its effect since `heal`."""
        return (self.faults / f"{event}.seen").exists()

    def batches(self) -> list[tuple[int, ...]]:
        """(first layer, number of layers, first token, stop token) of each batch sent since `heal`."""
        file = self.faults / "batches.sent"
        lines = file.read_text().splitlines() if file.exists() else []
        return [tuple(map(int, line.split())) for line in lines]
