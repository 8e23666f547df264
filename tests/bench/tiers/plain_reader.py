"""A program that has nothing of ours: it reads a file past the page cache and hashes it, as the agent does.

`plain_reader.py FILE`: four threads of niceness 10, MiB by MiB, until it is killed. Writes a line once they run.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading

import xxhash

_MIB, _THREADS = 1 << 20, 4


def read(file: int, size: int, memory: memoryview, number: int) -> None:
    at = number * _MIB
    while True:
        place = memory[at % len(memory) :][:_MIB]
        os.preadv(file, [place], at % size)
        xxhash.xxh3_64_intdigest(place)
        at += _THREADS * _MIB


def main(path: str) -> None:
    os.nice(10)
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # the file system cannot
        file = os.open(path, os.O_RDONLY)
    size = os.fstat(file).st_size // _MIB * _MIB
    memory = memoryview(mmap.mmap(-1, 256 * _MIB))
    for number in range(_THREADS):
        threading.Thread(target=read, args=(file, size, memory, number), daemon=True).start()
    print("reads", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
