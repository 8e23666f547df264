"""The tier `object`: how pages lie in the bucket, what is asked of the store, and what strangers can do."""

import functools
import threading
import time

import numpy as np
import obstore
import pytest
import xxhash
from obstore.store import S3Store
from tiers.s3_servers import BUCKET, KEY_ID, SECRET, environment, line, opened, refusal, settings

from mooncake_connector.config.tiers import ObjectTier
from store_client.base import Put
from store_client.testing import PAGE_NBYTES, chain, page_bytes
from store_client.tiers.base import SEAL_NBYTES, Target, TierError
from store_client.tiers.object import ObjectStore
from store_client.tiers.object.names import of_page, split_url
from store_client.tiers.open import open_tier
from store_client.tiers.seal import seal, why_broken
from store_client.tiers.testing import DEADLINE_S, Memory, contains, new_space, read, write
from store_client.tiers.testing import SECRET as MAC_KEY


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    environment(monkeypatch)


@pytest.fixture
def memory():
    return Memory()


def bucket(server) -> S3Store:
    """The bucket as a stranger sees it who may write there."""
    return S3Store(
        BUCKET, endpoint=f"http://127.0.0.1:{server.port}", access_key_id=KEY_ID, secret_access_key=SECRET,
        client_options={"allow_http": True}, disable_bulk_delete=True,
    )  # fmt: skip


def requests(tier) -> dict[str, int]:
    """What was asked of the store so far, by kind."""
    counted = dict(one.rsplit(" ", 1) for one in tier.stats().notes["requests"].split(", "))
    return {kind: int(count.replace(",", "")) for kind, count in counted.items()}


def lies_at(space, key, nbytes=PAGE_NBYTES) -> str:
    return f"some/prefix/{of_page(space, key, nbytes)}"


def verdict(tier, memory, space, key) -> str | None:
    """What the agent finds wrong with what it reads; "a miss" where nothing comes."""
    place = memory.page(PAGE_NBYTES)
    (found,) = tier.read(space, [Target(key, place)], nbytes=PAGE_NBYTES, deadline_s=DEADLINE_S)
    if found is None:
        return "a miss"
    return why_broken(found, space, key, place, xxhash.xxh3_64_intdigest(place[0].data), MAC_KEY)


def test_an_object_is_the_seal_and_the_page_under_a_name_that_says_what_it_is(files, memory):
    tier, space, (key,) = opened(files.port), new_space(), chain("a", 1)
    assert write(tier, memory, space, [key], pieces=3) == [Put.STORED]
    name = f"some/prefix/mckv1/{space.namespace.hex()}/0-4x0-2/{PAGE_NBYTES}/{key.hex()}"
    content = (files.bucket / name).read_bytes()
    page = page_bytes(key, PAGE_NBYTES)
    checksum = xxhash.xxh3_64_intdigest(page.data)
    assert content == seal(space, key, [page], checksum, MAC_KEY) + page.tobytes()
    tier.close()


def test_a_page_that_is_there_is_not_sent_again(files, memory):
    tier, space, keys = opened(files.port), new_space(), chain("a", 4)
    write(tier, memory, space, keys[:3])
    before = requests(tier)
    assert write(tier, memory, space, keys) == [Put.PRESENT] * 3 + [Put.STORED]
    after = requests(tier)
    assert (after["put"] - before["put"], after["head"] - before["head"]) == (1, 4)
    assert read(tier, memory, space, keys) == [True] * 4
    assert requests(tier)["get"] == 4, "one request a page"
    tier.close()


def test_a_page_that_another_host_writes_meanwhile_is_left_alone_where_the_store_can_refuse(files, memory, monkeypatch):
    tier, space, (key,) = opened(files.port), new_space(), chain("a", 1)
    write(tier, memory, space, [key])

    async def not_there_yet(path):
        return None

    monkeypatch.setattr(tier._bucket, "size", not_there_yet)
    path = files.bucket / lies_at(space, key)
    inode = path.stat().st_ino
    assert write(tier, memory, space, [key]) == [Put.PRESENT]
    assert path.stat().st_ino == inode
    tier.close()


def test_a_store_that_knows_no_condition_is_asked_for_it_once(files, memory):
    with line(files.port) as between:
        between.answer = lambda request: (
            refusal("501 Not Implemented", "NotImplemented") if b"if-none-match" in request.lower() else None
        )
        tier, space, keys = opened(between.port), new_space(), chain("a", 3)
        assert write(tier, memory, space, keys[:1]) == [Put.STORED]
        between.seen.clear()
        assert write(tier, memory, space, keys) == [Put.PRESENT, Put.STORED, Put.STORED]
        assert read(tier, memory, space, keys) == [True] * 3
        assert not [request for request in between.seen if b"if-none-match" in request.lower()]
        tier.close()


@pytest.mark.parametrize("left", [0, 1, SEAL_NBYTES, SEAL_NBYTES + PAGE_NBYTES - 1, SEAL_NBYTES + PAGE_NBYTES + 1])
def test_an_object_that_was_cut_or_grew_is_a_miss_and_is_written_again(gateway, memory, left):
    tier, space, keys = opened(gateway.port), new_space(), chain("a", 2)
    write(tier, memory, space, keys)
    obstore.put(bucket(gateway), lies_at(space, keys[0]), bytes(left))
    assert contains(tier, space, keys) == [False, True]
    assert read(tier, memory, space, keys) == [False, True]
    assert write(tier, memory, space, keys) == [Put.STORED, Put.PRESENT]
    assert read(tier, memory, space, keys) == [True, True]
    tier.close()


def test_what_a_stranger_put_in_a_pages_place_does_not_pass_its_seal(gateway, memory):
    tier, space, (key, other) = opened(gateway.port), new_space(), chain("a", 2)
    write(tier, memory, space, [key, other])
    stranger, name = bucket(gateway), lies_at(space, key)
    right = bytes(obstore.get(stranger, name).bytes())
    forged = np.full(PAGE_NBYTES, 7, dtype=np.uint8)
    forged_seal = seal(space, key, [forged], xxhash.xxh3_64_intdigest(forged.data), b"not the deployment's secret")
    contents = {
        bytes(len(right)): "no page of this format",
        right[:-1] + bytes([right[-1] ^ 1]): "wrong checksum",
        bytes(obstore.get(stranger, lies_at(space, other)).bytes()): "another page",
        forged_seal + forged.tobytes(): "wrong MAC",
        forged_seal[:32] + bytes(32) + forged.tobytes(): "wrong MAC",
        right: None,
    }
    for content, why in contents.items():
        obstore.put(stranger, name, content)
        assert verdict(tier, memory, space, key) == why
    assert tier.remove(space, [key], deadline_s=DEADLINE_S) == 1
    assert verdict(tier, memory, space, key) == "a miss"
    assert verdict(tier, memory, space, other) is None
    tier.close()


def test_clear_leaves_what_is_not_ours(files, memory):
    tier, space, keys = opened(files.port), new_space(), chain("a", 2)
    write(tier, memory, space, keys)
    folder = files.bucket / "some" / "prefix"
    own = folder / "mckv1" / space.namespace.hex() / "0-4x0-2" / str(PAGE_NBYTES)
    strangers = [
        files.bucket / "at the root", folder / "beside", folder / "mckv12" / "x", folder / "mckv1" / "notes",
        own / "README", own / (keys[0].hex() + ".bak"), own.parent / keys[0].hex(),
    ]  # fmt: skip
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    assert tier.clear(None, deadline_s=DEADLINE_S) >= 2
    assert {path.name for path in files.pages()} <= {"README", keys[0].hex() + ".bak"}
    assert all(path.read_bytes() == b"mine" for path in strangers)
    for path in strangers:
        path.unlink()
    tier.close()


def test_prefixes_and_buckets_are_told_apart(files, memory):
    first, second = opened(files.port), opened(files.port, url=f"s3://{BUCKET}/some")
    root = opened(files.port, url=f"s3://{BUCKET}")
    space, keys = new_space(), chain("a", 2)
    write(first, memory, space, keys)
    for tier in (second, root):
        assert contains(tier, space, keys) == [False] * 2
        assert tier.clear(space.namespace, deadline_s=DEADLINE_S) == 0
    assert read(first, memory, space, keys) == [True] * 2
    assert (second.stats().notes["address"], root.stats().notes["address"]) == (
        f"s3://{BUCKET}/some at http://127.0.0.1:{files.port}",
        f"s3://{BUCKET} at http://127.0.0.1:{files.port}",
    )
    for tier in (first, second, root):
        tier.close()


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://my.bucket-1/a/b_c", ("my.bucket-1", "a/b_c")),
        ("s3://bucket/model=x/", ("bucket", "model=x")),
        ("s3://Bucket/a", None),
        ("s3://b/a", None),
        ("s3://bucket//a", None),
        ("s3://bucket/../other", None),
        ("s3://bucket/a?token=x", None),
        ("s3://bucket/a#b", None),
        ("s3://user:word/a", None),
        ("https://bucket/a", None),
    ],
)
def test_urls(url, parts):
    assert split_url(url) == parts


def test_an_impossible_url_is_a_lasting_error_that_does_not_repeat_it():
    with pytest.raises(TierError, match="expected a bucket's name") as caught:
        ObjectStore(ObjectTier(url="s3://bucket/a?token=hush-in-the-url"))
    assert caught.value.lasting and "hush" not in str(caught.value)


def test_open_tier_opens_it_and_asks_for_the_secret(files):
    tier = open_tier(settings(files.port), b"a secret of the deployment")
    assert isinstance(tier, ObjectStore)
    tier.close()
    with pytest.raises(TierError, match="secret_file") as caught:
        open_tier(settings(files.port), b"")
    assert caught.value.lasting


def test_many_requests_of_a_batch_are_under_way_at_once(files, memory):
    """A store that answers nobody yet sees more than one request: they do not wait for each other."""
    with line(files.port) as between:
        tier, space, keys = opened(between.port), new_space(), chain("a", 8)
        between.hold()
        between.seen.clear()
        work = threading.Thread(target=functools.partial(contains, tier, space, keys))
        work.start()
        deadline_s = time.monotonic() + 60
        while len(between.seen) < 8 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert len(between.seen) == 8
        between.release()
        work.join(60)
        assert not work.is_alive()
        tier.close()
