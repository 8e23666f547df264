"""`why --request` tells of what was written down about a request."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from ground.why.asking import ask, refused

from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from mooncake_connector.request_record import RequestRecord, RunRecord
from store_client.embedded.requests import MOST_NBYTES


class TestRequests:
    def record(self, name: str, **said: Any) -> RequestRecord:
        line = RequestLine(id=name, prompt_tokens=640, local_tokens=0, hit_tokens=256, miss=Miss.EVICTED)
        told: dict[str, Any] = {
            "at_s": time.time() - 3 * 3600, "namespace": "ab" * 32, "page_tokens": 64, "missed": {Miss.EVICTED: 384},
            "has_salt": False,
            "runs": [RunRecord(0, 3, "stored"), RunRecord(4, 5, "gone", "pressure", 2 * 3600.0, 600.0),
                     RunRecord(6, 9, "unknown")],
        }  # fmt: skip
        return RequestRecord.of(line, **{**told, **said})

    def test_one_is_found_by_its_id_or_a_part_of_it(self, store):
        for name in ("cmpl-first-0", "cmpl-second-0", "second"):
            store.note_request(name, self.record(name).encode())
        said = ask("--request", "first")
        assert said.startswith("request cmpl-first-0, 3.0 h ago, pid ")
        assert "640 tokens: 0 in the engine's own cache, 256 from the pool, 0 from a prefill instance, 384 comp" in said
        assert "pages 0-3 hit, pages 4-5 evicted 5.0 h ago by pressure, unused for 10 min by then, pages 6-9" in said
        assert f"384 tokens {Miss.EVICTED.words.said}" in said and f"what to do: {Miss.EVICTED.words.do}" in said
        assert [found["id"] for found in json.loads(ask("--request", "second", "--json"))] == ["second"]
        assert ask("--request", "cmpl").count("request cmpl-") == 2

    def test_of_many_the_latest_are_shown(self, store):
        for number in range(8):
            name = f"cmpl-{number}"
            store.note_request(name, self.record(name, at_s=time.time() - 60 + number).encode())
        said = ask("--request", "cmpl")
        assert [line.split(",")[0] for line in said.splitlines() if line.startswith("request ")] == [
            f"request cmpl-{number}" for number in range(3, 8)
        ]
        assert "3 earlier ones have 'cmpl' in their id too" in said
        assert len(json.loads(ask("--request", "cmpl", "--json"))) == 8
        assert "it is empty" in refused("--request", "")

    def test_a_salt_is_said_and_never_shown(self, store):
        store.note_request("a", self.record("a", has_salt=True).encode())
        assert "salt: it shares pages with" in ask("--request", "a")

    def test_one_that_is_not_kept_is_an_error_that_says_what_to_set(self, store):
        assert "MOONCAKE_CONNECTOR_LOG_REQUESTS=1" in refused("--request", "a")
        store.note_request("a", self.record("a").encode())
        assert "is not among the 1 that are kept" in refused("--request", "b")

    @pytest.mark.parametrize("told", [b"{}", b"[]", b"\xff", b"null", b'{"id": 3}'])
    def test_what_is_no_record_is_left_out(self, store, told):
        store.note_request("a", told)
        store.note_request("b", self.record("b").encode())
        assert len(json.loads(ask("--request", "b", "--json"))) == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            {"at_s": -1e300}, {"at_s": 1e300}, {"missed": {"evicted": -1}}, {"hit_tokens": 1 << 60}, {"pid": -1},
            {"runs": [[0, 1, "gone", "pressure", 1e18, 0]]}, {"runs": [[0, 1, "gone", "pressure", 0, -1e300]]},
            {"runs": [[-5, 1, "gone", "pressure"]]},
        ],
    )  # fmt: skip
    def test_numbers_that_nobody_counts_make_no_record(self, store, wrong):
        told = json.loads(self.record("a").encode())
        assert RequestRecord.decode(json.dumps(told).encode()) is not None
        store.note_request("a", json.dumps({**told, **wrong}).encode())
        assert "no request is kept" in refused("--request", "a")

    def test_words_of_another_version_are_shown_as_they_are(self, store):
        odd = msgspec.structs.replace(
            self.record("a"), miss="newer", missed={"newer": 3}, runs=[RunRecord(0, 1, "odd", "odder")]
        )
        store.note_request("a", odd.encode())
        assert "3 tokens newer" in ask("--request", "a")

    def test_a_record_fits_however_much_there_is_to_say(self):
        runs = [RunRecord(i, i, "gone", "pressure", 1234567.123456789, 1234567.123456789) for i in range(10_000)]
        missed = dict.fromkeys(Miss, 1 << 40)
        record = self.record("\u00e9" * 10_000, runs=runs, missed=missed, has_salt=True)
        assert len(record.encode()) <= MOST_NBYTES
        assert RequestRecord.decode(record.encode()) == record
