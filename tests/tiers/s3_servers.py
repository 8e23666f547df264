"""Two real S3 servers and a bad line to them.

`Gateway` is JuiceFS's S3 gateway: signatures are checked, ranges and listings work, a put is a rename, and it takes no
notice of the condition of a conditional put. `Files` is localbucket: no credentials, objects are files whose times can
be set, and puts have conditions.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_connector.config.tiers import ObjectTier
from store_client.tiers.object import ObjectStore

BUCKET = "pages"
KEY_ID, SECRET = "AKIDOFTESTSXYZ", "hush-the-secret-of-the-tests"
START_S = 120.0
BIN = Path(sys.executable).parent


def environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Credentials of the servers, and no others."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    given = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, **variables}
    for name, value in {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", **given}.items():
        if value:
            monkeypatch.setenv(name, value)


def settings(port: int, **fields: object) -> ObjectTier:
    """The tier of a server on this machine; waits are long, since machines are busy."""
    defaults = {"url": f"s3://{BUCKET}/some/prefix", "endpoint": f"http://127.0.0.1:{port}", "timeout_s": 60.0}
    return ObjectTier(**{**defaults, **fields})


def opened(port: int, **fields: object) -> ObjectStore:
    return ObjectStore(settings(port, **fields))


class _Server:
    """A process that listens on `port`. `kill` is SIGKILL, and `start` comes back on the same port."""

    program = ""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, 0
        self._process: subprocess.Popen[bytes] | None = None
        if not (BIN / self.program).exists():
            pytest.skip(f"NOT INSTALLED: {self.program} ({BIN}), an S3 server to test with; `make setup` installs it")

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        deadline_s = time.monotonic() + START_S
        asked = self.port
        while time.monotonic() < deadline_s:
            self.port = asked or _free_port()
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "MINIO_ROOT_USER": KEY_ID, "MINIO_ROOT_PASSWORD": SECRET},
            )  # fmt: skip
            while self._process.poll() is None and time.monotonic() < deadline_s:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                    return
                time.sleep(0.02)
            self.kill()  # somebody else had the port
        raise AssertionError(f"{self.program} did not begin to listen within {START_S:g} s")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


class Gateway(_Server):
    program = "juicefs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._meta = f"sqlite3://{folder}/meta.db"
        subprocess.run(
            [BIN / "juicefs", "format", self._meta, BUCKET, "--storage=file", f"--bucket={folder}/data/",
             "--trash-days=0", "--no-update"],
            check=True, capture_output=True, timeout=START_S,
        )  # fmt: skip

    def command(self) -> list[str]:
        return [
            str(BIN / "juicefs"), "gateway", self._meta, f"127.0.0.1:{self.port}", f"--log={self.folder}/log",
            "--no-usage-report", "--no-banner", "--no-bgjob", "--backup-meta=0", "--metrics=127.0.0.1:0",
            f"--cache-dir={self.folder}/cache", "--cache-size=0", "--attr-cache=0", "--dir-entry-cache=0",
        ]  # fmt: skip


class Files(_Server):
    program = "localbucket"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bucket = folder / "data" / BUCKET
        self.bucket.mkdir(parents=True)

    def command(self) -> list[str]:
        more = "import socketserver as s; s.TCPServer.request_queue_size = 512"  # or 5 connections may wait, no more
        program = f"{more}; import localbucket; localbucket.main()"
        return [sys.executable, "-c", program, str(self.bucket.parent), "--port", str(self.port)]

    def pages(self, prefix: str = "some/prefix/mckv1") -> list[Path]:
        return sorted(path for path in (self.bucket / prefix).glob("*/*/*/*") if path.is_file())


class Line:
    """A TCP line to a server, which can be held, and on which `answer(request)` may answer in the server's place."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.answer: Callable[[bytes], bytes | None] = lambda request: None
        self.seen: list[bytes] = []
        """First bytes of what clients sent, a request each as a rule."""
        self._open = threading.Event()
        self._open.set()
        self.holding = threading.Event()
        """Set once something waits that is held."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        self.holding.clear()
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.release()
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._to), 10) as server:
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            while data := client.recv(1 << 20):
                self.seen.append(data[:200])
                if not self._open.is_set():
                    self.holding.set()
                    assert self._open.wait(START_S)
                if (answer := self.answer(data)) is not None:
                    client.sendall(answer)
                    return
                server.sendall(data)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def skewed(program: str, port: int, clock: str) -> str:
    """What a Python program prints that is given a server's port, in a process whose clock is off by `clock`."""
    library = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
    if library is None:
        pytest.skip("NOT INSTALLED: libfaketime (tests/requirements/system.txt), which gives one process a wrong clock")
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    variables = {
        "LD_PRELOAD": str(library), "FAKETIME": clock, "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }  # fmt: skip
    ending = "\nimport os, sys; sys.stdout.flush(); os._exit(0)"  # the library may abort a process that ends as usual
    process = subprocess.Popen(
        [sys.executable, "-c", program + ending, str(port)], text=True, env={**os.environ, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        said, complaints = process.communicate(timeout=START_S)
    finally:
        process.kill()
        process.wait()
        for name in (f"faketime_shm_{process.pid}", f"sem.faketime_sem_{process.pid}"):
            Path("/dev/shm", name).unlink(missing_ok=True)
    assert process.returncode == 0, complaints
    return said.strip()


def refusal(status: str, code: str, more: str = "") -> bytes:
    """An S3 server's answer that a request failed."""
    body = f"<Error><Code>{code}</Code>{more}</Error>".encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@contextlib.contextmanager
def line(port: int) -> Iterator[Line]:
    one = Line(port)
    try:
        yield one
    finally:
        one.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
