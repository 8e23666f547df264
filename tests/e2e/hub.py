"""Stands in for the Hugging Face hub: one repository over HTTP, as much of its API as a download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


@contextmanager
def hub(repository: str, folder: Path) -> Iterator[str]:
    """Its address, while it serves a folder, and the weights in another format, under the name of a repository."""
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    files["pytorch_model.bin"] = b"the same in another format"
    names = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
    about = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    tree = [{"type": "file", "path": name, "size": len(files[name]), "oid": names[name]} for name in files]

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            path, name = self.path.partition("?")[0], self.path.rpartition("/")[2]
            if path.startswith(f"/api/models/{repository}/tree/"):
                self._say(200, json.dumps(tree).encode())
            elif path.startswith(f"/api/models/{repository}"):
                self._say(200, json.dumps(about).encode())
            elif path.startswith(f"/{repository}/resolve/") and name in files:
                self._say(200, files[name], {"ETag": f'"{names[name]}"'})
            else:
                self._say(404, b"", {"X-Error-Code": "EntryNotFound"})

        do_HEAD = do_GET

        def _say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for header, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()
