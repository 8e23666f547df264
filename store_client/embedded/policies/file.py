"""The hints of a pool, in a file of its data folder that all its processes map."""

import mmap
import os
from pathlib import Path

from mooncake_connector.log import get_logger, log_once
from store_client.embedded.locks import open_file, secure_bytes
from store_client.embedded.policies.hints import Hints, hints_nbytes

logger = get_logger(__name__)


def open_hints(path: Path, max_pages: int) -> Hints | None:
    """The hints in the file `path`, made if it is missing or of another size, as of a pool of a former version.

    None where that fails: the pool then evicts what was least recently used. Under the pool's open lock.
    """
    nbytes = hints_nbytes(max_pages)
    try:
        if not path.exists() or path.stat().st_size != nbytes:
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                secure_bytes(fd, 0, nbytes)
            except OSError:
                new.unlink()
                raise
            finally:
                os.close(fd)
            os.replace(new, path)
        fd = open_file(path, os.O_RDWR)
        try:
            return Hints(mmap.mmap(fd, nbytes), max_pages)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        log_once(
            "store.hints", "pool %s: no room for what its eviction policy remembers (%s): the least recently used "
            "pages are evicted", path.parent.parent, error, logger=logger,
        )  # fmt: skip
        return None
