"""How a script says what it has measured; the scripts beside this one import it by this name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_outcome(path: str, outcome: Mapping[str, Any]) -> None:
    """Replace the file in one step: its reader looks at any time."""
    partial = Path(path + ".partial")
    partial.write_text(json.dumps(outcome))
    partial.rename(path)
