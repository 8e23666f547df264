"""Which files of Mooncake's wheel a process has in its memory."""

from __future__ import annotations

from pathlib import Path


def of_mooncake(pid: int) -> set[str]:
    """Its libraries, and those that the wheel brings for them."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return {file for file in files if "/site-packages/mooncake/" in file or "/mooncake_transfer_engine" in file}
