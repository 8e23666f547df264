"""Pages and figures of the pool over HTTP, for programs in other languages. docs/openapi.yaml describes it.

A page is named by its namespace, its key and the shard that it is of. What is read is verified, as it is for an engine;
what is written becomes what engines read, so none of it is open without the token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash

from mooncake_connector.config.values import shown
from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import printable
from store_client.agent.http.app import Request, Response, Route
from store_client.agent.index.requests import Refused
from store_client.base import Bytes, Put
from store_client.embedded import EmbeddedSpace, EmbeddedStore

PREFIX = "/v1/pages/"
MAX_PAGE_NBYTES = 64 << 20
CHECKSUM = "x-checksum-xxh3-64"
WRITE_S = 5.0
"""For the pool's lock."""

_PATH = re.compile(r"/v1/pages/(?P<namespace>[0-9a-f]{8,64})/(?P<key>[0-9a-f]{64})")
_SHARD = re.compile(r"([0-9]{1,6})-([0-9]{1,6}),([0-9]{1,6})-([0-9]{1,6})")
_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")
_PARTIAL = (b"content-range", b"content-encoding")
"""With these a body is not the page."""


class Pages:
    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        return {
            "/v1/stats": {"GET": Route(self._stats)},
            "/v1/namespaces": {"GET": Route(self._namespaces)},
            PREFIX: {
                "GET": Route(self._get, needs_token=True, answers_large=True),
                "HEAD": Route(self._get, needs_token=True, answers_large=True),
                "PUT": Route(self._put, needs_token=True, max_body_nbytes=MAX_PAGE_NBYTES, answers_large=True),
                "DELETE": Route(self._delete, needs_token=True),
            },
        }

    async def _stats(self, request: Request) -> Response:
        return Response(dataclasses.asdict(await self._ask(self._store.stats)))

    async def _namespaces(self, request: Request) -> Response:
        listed = [
            {
                "namespace": info.namespace.digest.hex(), "shard": _text_of(info.shard), "pages": info.pages,
                "nbytes": info.nbytes, "oldest_s": info.oldest_s, "idle_s": info.idle_s,
                "fields": info.namespace.to_dict(),
            }
            for info in await self._ask(self._store.namespaces)
        ]  # fmt: skip
        return Response({"namespaces": listed})

    async def _ask(self, question: Any) -> Any:
        try:
            return await asyncio.to_thread(question)
        except MooncakeConnectorError as error:
            raise Refused(f"the pool gives no answer: {error}", 503, "unavailable") from None

    async def _get(self, request: Request) -> Response:
        space, _, key = self._place(request)
        page = await asyncio.to_thread(_read, space, key)
        if page is None:
            raise Refused(f"page {key.hex()} is not in the pool", 404, "absent")
        headers = {
            CHECKSUM: f"{xxhash.xxh3_64_intdigest(page):016x}", "etag": f'"{key.hex()}"', "accept-ranges": "bytes",
        }  # fmt: skip
        asked = request.headers.get(b"range", b"").decode("latin-1")
        first, stop = _range(asked, len(page))
        if first >= stop:
            said = {"error": f"range {shown(asked)}: the page has {len(page)} bytes", "reason": "range"}
            return Response(said, 416, {"content-range": f"bytes */{len(page)}"})
        if (first, stop) == (0, len(page)):
            return Response(page, 200, headers)
        return Response(page[first:stop], 206, {**headers, "content-range": f"bytes {first}-{stop - 1}/{len(page)}"})

    async def _put(self, request: Request) -> Response:
        if wrong := [name.decode() for name in _PARTIAL if name in request.headers]:
            raise Refused(f"the request has {wrong[0]}: expected all of the page, as it is")
        space, (namespace, shard), key = self._place(request, writes=True)
        page, parent = request.body, _hex(request, "x-parent-key")
        checksum = request.headers.get(CHECKSUM.encode(), b"").decode("latin-1").lower()
        seen = f"{xxhash.xxh3_64_intdigest(page):016x}"
        if checksum and checksum != seen:
            raise Refused(f"{CHECKSUM} is {shown(checksum)}, and that of the body {seen}", 400, "checksum")
        expected = self._expected_nbytes(namespace, shard)
        if not page or (expected is not None and len(page) != expected):
            wanted = "at least 1" if expected is None else expected
            raise Refused(f"the page has {len(page)} bytes: expected {wanted} for shard {_text_of(shard)}")

        def fill(i: int, view: Bytes) -> None:
            view[:] = np.frombuffer(page, dtype=np.uint8)

        def write() -> Put:
            return space.write([key], fill, nbytes=len(page), parents=[parent], deadline_s=WRITE_S)[0]

        put = await asyncio.to_thread(write)
        if put is Put.FAILED:
            raise Refused("the pool could not store the page: it is full of newer ones, or busy", 503, "failed")
        return Response({"stored": put is Put.STORED}, 201 if put is Put.STORED else 200, {CHECKSUM: seen})

    async def _delete(self, request: Request) -> Response:
        space, _, key = self._place(request)
        if not await asyncio.to_thread(space.remove, [key]):
            raise Refused(f"page {key.hex()} is not in the pool", 404, "absent")
        return Response(None, 204)

    def _place(self, request: Request, *, writes: bool = False) -> tuple[EmbeddedSpace, tuple[Namespace, Shard], bytes]:
        match = _PATH.fullmatch(request.path)
        if match is None:
            expected = "/v1/pages/NAMESPACE/KEY, at least the first 8 and all 64 hexadecimal digits, in lower case"
            raise Refused(f"path {shown(request.path)}: expected {expected}", 404, "unknown")
        namespace = self._namespace(match["namespace"], request if writes else None)
        shard = self._shard(namespace, request.query.get("shard", ""))
        return self._store.space(namespace, shard), (namespace, shard), bytes.fromhex(match["key"])

    def _namespace(self, digest: str, request: Request | None) -> Namespace:
        """One that the pool knows, or where a page of a new one is written, the one that the request describes."""
        text = request.headers.get(b"x-namespace") if request is not None else None
        if text is not None:
            try:
                described = Namespace.from_dict(msgspec.json.decode(text, type=dict[str, Any]))
            except (MooncakeConnectorError, msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise Refused(f"x-namespace describes none: {printable(str(error), 300)}") from None
            if described.digest.hex() != digest:
                raise Refused(f"x-namespace describes {described.digest.hex()}, and the path says {digest}")
            return described
        fitting = {one.digest: one for one, _ in self._store.spaces() if one.digest.hex().startswith(digest)}
        if len(fitting) != 1:
            seen = f"{len(fitting)} namespaces" if fitting else "no namespace"
            raise Refused(f"{digest} is {seen} of the pool: GET /v1/namespaces lists them", 404, "unknown")
        return next(iter(fitting.values()))

    def _shard(self, namespace: Namespace, text: str) -> Shard:
        if not text:
            known = self._store.shards(namespace)
            if len(known) <= 1:
                return known[0] if known else Shard(0, namespace.num_layers, 0, namespace.num_kv_heads)
            raise Refused(f"the pool has shards {' '.join(map(_text_of, known))}: say which, as ?shard=")
        match = _SHARD.fullmatch(text)
        try:
            if match is None:
                raise ValueError("it has another form")
            shard = Shard(*map(int, match.groups()))
            model = Shard(0, namespace.num_layers, 0, namespace.num_kv_heads)
            if not namespace.group and not model.covers(shard):
                raise ValueError(f"the model has {_text_of(model)}")
            return shard
        except ValueError as error:
            expected = "LAYERS,HEADS as FIRST-STOP,FIRST-STOP, such as 0-32,0-8"
            raise Refused(f"shard {shown(text)}: expected {expected} ({printable(str(error))})") from None

    def _expected_nbytes(self, namespace: Namespace, shard: Shard) -> int | None:
        unit_nbytes = namespace.unit_nbytes
        return None if unit_nbytes is None else shard.num_units * unit_nbytes


def _read(space: EmbeddedSpace, key: bytes) -> bytes | None:
    found: list[bytes] = []
    nbytes = space.sizes([key])[0]
    if not nbytes or not space.read([key], lambda i, view: found.append(view.tobytes()), nbytes=nbytes)[0]:
        return None
    return found[-1]


def _hex(request: Request, name: str) -> bytes | None:
    text = request.headers.get(name.encode(), b"").decode("latin-1")
    if not text:
        return None
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise Refused(f"{name} is {shown(text)}: expected 64 hexadecimal digits, in lower case")
    return bytes.fromhex(text)


def _range(text: str, nbytes: int) -> tuple[int, int]:
    """First byte, and the one behind the last; the same where the page has no such part, and all of it where what is
    asked for is no range, or several."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or match.groups() == ("", ""):
        return 0, nbytes
    first, last = (int(one[:20]) if one else None for one in match.groups())
    if first is None:
        return max(0, nbytes - (last or 0)), nbytes
    if last is None:
        return min(first, nbytes), nbytes
    return (0, nbytes) if last < first else (min(first, nbytes), min(last + 1, nbytes))


def _text_of(shard: Shard) -> str:
    return f"{shard.layer_start}-{shard.layer_stop},{shard.head_start}-{shard.head_stop}"
