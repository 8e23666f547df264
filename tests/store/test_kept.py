"""What engines leave of requests in a pool that they share."""

from types import SimpleNamespace

from mooncake_connector.request_line import RequestLine
from mooncake_connector.request_record import RequestRecord
from store_client import kept

LINE = RequestLine(id="asked-by-a-client", prompt_tokens=64, local_tokens=0, hit_tokens=0)


def keep(store):
    opened = SimpleNamespace(store=store)
    kept.keep(opened, LINE, kept.look(None, (), (), 0), page_tokens=64, missed={}, has_salt=False)


def test_both_sides_of_a_request_keep_theirs_also_in_containers_with_the_same_pids(store, monkeypatch):
    monkeypatch.setattr("mooncake_connector.request_record.os.getpid", lambda: 7)  # names have one of 512 places
    monkeypatch.setattr(kept, "_CONTAINER", "one")
    keep(store)
    keep(store)
    assert len(store.noted_requests()) == 1, "of one process the latest"
    monkeypatch.setattr(kept, "_CONTAINER", "another")
    keep(store)
    assert [RequestRecord.decode(told).id for told in store.noted_requests()] == [LINE.id] * 2
