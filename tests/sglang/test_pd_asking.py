"""Bootstrap servers that are asked: who never answers holds up nobody but who asks there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENDS = """
import threading
from sglang_backend.pd.asking import Asking

asking, has_begun = Asking(), threading.Event()
asking.ask("127.0.0.1:1", "never answered", lambda: (has_begun.set(), threading.Event().wait()))
assert has_begun.wait(60.0)
asking.close()
"""


def test_a_process_ends_that_waits_for_an_answer(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=60.0, cwd=tmp_path)
