"""Copies between pieces of the arena and scattered buffers, with the checksum computed on the way.

Large copies let go of the interpreter lock. Small ones keep it: taking it back beside a busy thread can cost
milliseconds, many times the copy.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from store_client.base import Bytes, Scatter

_CHUNK_NBYTES = 256 << 10
"""Small enough that what was just copied is still in the processor's own cache when it is hashed."""
_WHOLE_NBYTES = 1 << 62
_KEEP_LOCK_NBYTES = 64 << 10


def as_pieces(buffers: Scatter) -> list[memoryview]:
    """Flat byte views of one buffer or of several. Raises ValueError for one that is not contiguous."""
    listed = buffers if isinstance(buffers, (list, tuple)) else (buffers,)
    return [_flat(buffer) for buffer in listed]


def _flat(buffer: object) -> memoryview:
    view = memoryview(buffer)  # type: ignore[arg-type]
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    try:
        return view.cast("B")
    except TypeError:
        raise ValueError(f"buffer of shape {view.shape}, strides {view.strides} is not C-contiguous") from None


def copy(target: memoryview, source: memoryview) -> None:
    if len(target) <= _KEEP_LOCK_NBYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def runs(
    sources: Sequence[memoryview], targets: Sequence[memoryview], limit: int
) -> Iterator[tuple[memoryview, memoryview]]:
    """Pairs (target, source) of equal size, at most `limit` bytes, that together copy all of `targets`."""
    if len(sources) == 1 and limit == _WHOLE_NBYTES:
        at = 0
        for target in targets:
            yield target, sources[0][at : at + len(target)]
            at += len(target)
        return
    source_iter, target_iter = iter(sources), iter(targets)
    source, target = memoryview(b""), memoryview(b"")
    while True:
        while not len(target):
            following = next(target_iter, None)
            if following is None:
                return
            target = following
        while not len(source):
            source = next(source_iter)
        size = min(len(source), len(target), limit)
        yield target[:size], source[:size]
        source, target = source[size:], target[size:]


def copy_hashed(sources: Sequence[memoryview], targets: Sequence[memoryview], *, hash_target: bool) -> int:
    """Copy everything and return the xxh3_64 of the target's bytes where asked and possible, else of the source's.

    What lies in one piece is hashed in one go, which is faster than piecewise: 1 MiB pages are copied and hashed at 15
    GB/s so, and at 13 GB/s in chunks, where the copy alone takes 18 GB/s.
    """
    if hash_target and len(targets) == 1:
        for target, source in runs(sources, targets, _WHOLE_NBYTES):
            copy(target, source)
        return xxhash.xxh3_64_intdigest(targets[0])
    if len(sources) == 1:
        digest = xxhash.xxh3_64_intdigest(sources[0])
        for target, source in runs(sources, targets, _WHOLE_NBYTES):
            copy(target, source)
        return digest
    state = xxhash.xxh3_64()
    for target, source in runs(sources, targets, _CHUNK_NBYTES):
        state.update(source)
        copy(target, source)
    return state.intdigest()


def copy_range(sources: Sequence[Bytes], targets: Sequence[memoryview], offset: int) -> None:
    """Copy from byte `offset` of the sources on, as much as the targets hold."""
    rest: list[memoryview] = []
    for source in sources:
        skipped = min(offset, len(source))
        offset -= skipped
        if skipped < len(source):
            rest.append(source.data[skipped:])
    for target, piece in runs(rest, targets, _WHOLE_NBYTES):
        copy(target, piece)


def gather(pieces: Sequence[Bytes], nbytes: int) -> Bytes:
    """The pieces as one contiguous array: a private copy."""
    whole: Bytes = np.empty(nbytes, dtype=np.uint8)
    copy_range(pieces, [whole.data], 0)
    return whole
