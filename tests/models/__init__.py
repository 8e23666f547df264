"""Checkpoints that the engine tests run on, made once and kept in `.cache/models`.

`checkpoint("smollm2")` returns the folder of a Hugging Face checkpoint and makes it first if it is not there. Making
one needs transformers, which `.venvs/vllm` has; `make models` makes them all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["CACHE", "MAKERS", "checkpoint"]

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"


def _smollm2(folder: Path) -> None:
    from models.smollm2 import make

    make(folder)


def _qwen3(seed: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from models.random_weights import make_qwen3

        make_qwen3(folder, seed=seed)

    return make


def _deepseek_mla(folder: Path) -> None:
    from models.random_weights import make_deepseek_mla

    make_deepseek_mla(folder, seed=3)


def _hybrid(maker: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from models import hybrid

        getattr(hybrid, maker)(folder)

    return make


MAKERS: dict[str, Callable[[Path], None]] = {
    "smollm2": _smollm2,
    "qwen3": _qwen3(seed=1),
    "qwen3-other": _qwen3(seed=2),  # the same architecture and tokenizer, other weights
    "deepseek-mla": _deepseek_mla,
    "gemma3": _hybrid("make_gemma3"),
    "gpt-oss": _hybrid("make_gpt_oss"),
    "qwen3-next": _hybrid("make_qwen3_next"),
    "cohere2": _hybrid("make_cohere2"),
}


def checkpoint(name: str) -> Path:
    """Folder of the checkpoint called `name` (a key of `MAKERS`), made now if it is missing.

    Several processes may ask at once: one makes, the others wait for its lock. The folder appears by a rename, so that
    an interrupted run leaves nothing that looks complete.
    """
    make = MAKERS.get(name)
    if make is None:
        raise ValueError(f"no checkpoint is called {name!r}; there are {', '.join(MAKERS)}")
    folder = CACHE / name
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        unfinished = CACHE / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        make(unfinished)
        os.rename(unfinished, folder)
    return folder
