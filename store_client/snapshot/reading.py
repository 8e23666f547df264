"""A snapshot that is there: found, proven as far as its manifest and index go, and its pages read."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from pathlib import Path

import numpy as np

from mooncake_connector.errors import SnapshotError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.snapshot import folders, form
from store_client.snapshot.files import PagesReader
from store_client.snapshot.form import ENTRY, Entries, Manifest

_INDEX_AT_ONCE = 16 << 20


class Snapshot:
    """A snapshot in a folder, opened for reading: its manifest and index are whole, or it is a SnapshotError.

    While it is open the folder is kept from the next snapshot's tidying up; replacing it does no harm.
    """

    def __init__(self, path: Path) -> None:
        self.path = _find(Path(os.path.abspath(path)))
        with contextlib.ExitStack() as opened:
            try:
                self._folder = folders.open_folder(self.path)
                opened.callback(os.close, self._folder)
                self._check_owner()
                folders.lock(self._folder, fcntl.LOCK_SH)
                raw = folders.read_inside(self._folder, form.MANIFEST, form.MAX_MANIFEST_NBYTES)
            except OSError as error:
                raise SnapshotError(
                    f"{self.path} is not a snapshot of a pool that can be read ({error.filename or self.path}: "
                    f"{error.strerror}): name a folder that `mooncake-connector store snapshot` wrote"
                ) from None
            self.manifest: Manifest = form.parse_manifest(raw, self.path)
            self._check_sizes()
            self.entries: Entries = self._read_index()
            form.check_entries(self.entries, self.manifest, self.path)
            self.files = PagesReader(self._folder, self.manifest.files)
            opened.pop_all()
        self.spaces: list[tuple[Namespace, Shard] | None] = [space.name() for space in self.manifest.spaces]
        """Namespace and shard by the entries' numbers; None where this version does not know them."""

    def _check_owner(self) -> None:
        """Whoever may write here decides what engines read."""
        status = os.fstat(self._folder)
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SnapshotError(
                f"snapshot {self.path} belongs to user {status.st_uid} and has mode {status.st_mode & 0o777:04o}: "
                "others may have written to it, so it is not used; if you trust it, make it yours (chown, chmod 700)"
            )

    def _check_sizes(self) -> None:
        expected = {form.pages_file(number): nbytes for number, nbytes in enumerate(self.manifest.files)}
        expected[form.INDEX] = self.manifest.pages * ENTRY.itemsize
        for name, nbytes in expected.items():
            try:
                status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            except OSError as error:
                raise form.damaged(self.path, f"{name}: {error.strerror}") from None
            if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
                raise form.damaged(self.path, f"{name} has {status.st_size} bytes and should have {nbytes}")

    def _read_index(self) -> Entries:
        digest = hashlib.sha256()
        try:
            content = np.empty(self.manifest.pages * ENTRY.itemsize, dtype=np.uint8)
            with os.fdopen(folders.open_inside(self._folder, form.INDEX), "rb", buffering=0) as file:
                for at in range(0, len(content), _INDEX_AT_ONCE):
                    part = content[at : at + _INDEX_AT_ONCE].data
                    while len(part):
                        count = file.readinto(part)
                        if not count:
                            raise form.damaged(self.path, f"{form.INDEX} ends too early")
                        digest.update(part[:count])
                        part = part[count:]
        except OSError as error:
            raise form.damaged(self.path, f"{form.INDEX}: {error.strerror}") from None
        except MemoryError:
            raise SnapshotError(f"snapshot {self.path}: no memory for an index of {len(content)} bytes") from None
        if digest.hexdigest() != self.manifest.index_sha256:
            raise form.damaged(self.path, f"{form.INDEX} does not match its SHA-256")
        return content.view(ENTRY)

    def close(self) -> None:
        self.files.close()
        os.close(self._folder)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _find(path: Path) -> Path:
    """The folder, or where a command that was killed has left the former snapshot."""
    former = folders.former_of(path)
    return former if not os.path.lexists(path) and os.path.lexists(former) else path
