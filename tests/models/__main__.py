"""`python -m models [NAME ...]`: make the checkpoints of those names, or all of them, and print their folders."""

from __future__ import annotations

import sys
import time

from models import MAKERS, checkpoint

for name in sys.argv[1:] or MAKERS:
    started = time.monotonic()
    folder = checkpoint(name)
    print(f"{name}: {folder} ({time.monotonic() - started:.1f} s)", flush=True)
