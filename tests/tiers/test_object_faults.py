"""The tier `object` when the store, the line to it, the credentials or the clock are not as they should be."""

import logging
import threading
import time

import numpy as np
import pytest
from tiers.s3_servers import BUCKET, KEY_ID, SECRET, Gateway, environment, line, opened, refusal, skewed

from store_client.base import Put
from store_client.testing import PAGE_NBYTES, chain
from store_client.tiers.base import Target, TierError
from store_client.tiers.object.credentials import shared_credentials
from store_client.tiers.testing import DEADLINE_S, Memory, contains, new_space, read, write

AGAIN_S = 0.2
"""The package asks for keys that have ended not sooner."""


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    environment(monkeypatch)


@pytest.fixture
def memory():
    return Memory()


def refused(call, *, cause: str, lasting: bool = False) -> str:
    """What the TierError of a call says, which it must raise."""
    with pytest.raises(TierError) as caught:
        call()
    assert (caught.value.cause, caught.value.lasting) == (cause, lasting), str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "a log would show what it came from"
    return str(caught.value)


def test_a_server_that_is_killed_in_the_middle_of_a_call_and_comes_back(tmp_path, memory):
    with Gateway(tmp_path) as server, line(server.port) as between:
        tier, space, keys = opened(between.port), new_space(), chain("a", 4)
        write(tier, memory, space, keys)
        between.hold()
        found = []

        def work():
            try:
                read(tier, memory, space, keys)
            except TierError as error:
                found.append(error)

        reader = threading.Thread(target=work)
        reader.start()
        assert between.holding.wait(60)
        server.kill()
        between.release()
        reader.join(120)
        assert [(error.cause, error.lasting) for error in found] == [("unavailable", False)]
        refused(lambda: write(tier, memory, space, chain("b", 2)), cause="unavailable")
        refused(lambda: tier.clear(space.namespace, deadline_s=DEADLINE_S), cause="unavailable")
        server.start()
        assert read(tier, memory, space, keys) == [True] * 4, "the same tier goes on, and what was there is there"
        tier.close()


def test_nobody_listens(memory):
    with line(1) as between:
        port = between.port
    text = refused(lambda: opened(port), cause="unavailable")
    assert f"s3://{BUCKET}/some/prefix at http://127.0.0.1:{port}" in text and "nothing listens there" in text


def test_wrong_credentials(gateway, monkeypatch):
    environment(monkeypatch, AWS_SECRET_ACCESS_KEY="not-this-secret")
    assert "SignatureDoesNotMatch" in refused(lambda: opened(gateway.port), cause="denied", lasting=True)
    environment(monkeypatch, AWS_ACCESS_KEY_ID="NOTTHISKEY")
    assert "check the credentials" in refused(lambda: opened(gateway.port), cause="denied", lasting=True)


def test_a_bucket_that_is_missing(gateway):
    text = refused(lambda: opened(gateway.port, url="s3://not-there/x"), cause="unavailable", lasting=True)
    assert "there is no such bucket" in text and "NoSuchBucket" in text


def test_a_bucket_that_is_deleted_later(files, memory):
    tier, space, keys = opened(files.port), new_space(), chain("a", 2)
    write(tier, memory, space, keys)
    aside = files.bucket.with_name("aside")
    files.bucket.rename(aside)
    try:
        assert contains(tier, space, keys) == [False] * 2
        refused(lambda: read(tier, memory, space, keys), cause="unavailable", lasting=True)
        refused(lambda: write(tier, memory, space, keys), cause="unavailable", lasting=True)
    finally:
        aside.rename(files.bucket)
    assert read(tier, memory, space, keys) == [True] * 2
    tier.close()


def test_a_store_that_does_not_answer_is_given_up_at_the_deadline_and_writes_nothing_afterwards(gateway, memory):
    with line(gateway.port) as between:
        tier, space, keys = opened(between.port), new_space(), chain("a", 3)
        write(tier, memory, space, keys)
        between.hold()
        places = [memory.page(PAGE_NBYTES) for _ in keys]
        targets = [Target(key, place) for key, place in zip(keys, places, strict=True)]
        late = {
            "read": lambda: tier.read(space, targets, nbytes=PAGE_NBYTES, deadline_s=0.2),
            "contains": lambda: tier.contains(space, keys, nbytes=PAGE_NBYTES, deadline_s=0.2),
            "remove": lambda: tier.remove(space, keys, deadline_s=0.2),
            "clear": lambda: tier.clear(space.namespace, deadline_s=0.2),
        }
        for name, call in late.items():
            assert "no answer in time" in refused(call, cause="timeout"), name
        between.release()
        assert read(tier, memory, space, keys) == [True] * 3
        assert all((place[0] == 0xA5).all() for place in places)
        assert "timeout" in tier.stats().notes["failed requests"]
        tier.close()


def test_a_connection_that_is_silent_is_given_up_by_itself(gateway):
    """Long deadlines, as that of a purge, do not mean that one request may take as long."""
    with line(gateway.port) as between:
        tier, space = opened(between.port, timeout_s=1.0), new_space()
        between.hold()
        refused(lambda: tier.purge(space.namespace, deadline_s=600), cause="timeout")
        between.release()
        tier.close()


@pytest.mark.parametrize(
    ("status", "code", "cause", "lasting"),
    [
        ("503 Slow Down", "SlowDown", "unavailable", False),
        ("500 Internal Server Error", "InternalError", "unavailable", False),
        ("429 Too Many Requests", "TooManyRequests", "unavailable", False),
        ("403 Forbidden", "AccessDenied", "denied", True),
        ("400 Bad Request", "ExpiredToken", "denied", True),
        ("507 Insufficient Storage", "XMinioStorageFull", "full", False),
        ("301 Moved Permanently", "PermanentRedirect", "unavailable", True),
        ("418 A Teapot", "Teapot", "error", False),
    ],
)
def test_what_a_store_answers_becomes_a_cause(files, memory, status, code, cause, lasting):
    with line(files.port) as between:
        tier, space, keys = opened(between.port), new_space(), chain("a", 2)
        between.answer = lambda request: refusal(status, code)
        text = refused(lambda: read(tier, memory, space, keys), cause=cause, lasting=lasting)
        assert code in text or status.startswith("301")
        tier.close()


def test_pages_that_come_are_not_lost_with_one_that_does_not(files, memory, caplog):
    with line(files.port) as between:
        tier, space, keys = opened(between.port, name="partly"), new_space(), chain("a", 4)
        write(tier, memory, space, keys[:3])
        bad = keys[1].hex().encode()
        between.answer = lambda request: refusal("418 A Teapot", "Teapot") if bad in request[:300] else None
        with caplog.at_level(logging.WARNING, logger="mooncake_connector"):
            assert read(tier, memory, space, keys) == [True, False, True, False]
            assert contains(tier, space, keys) == [True, False, True, False]
            assert write(tier, memory, space, keys) == [Put.PRESENT, Put.FAILED, Put.PRESENT, Put.STORED]
        assert len(caplog.records) == 1 and "1 of 4 requests failed" in caplog.text
        assert tier.stats().notes["failed requests"] == "error 3"
        tier.close()


def test_an_answer_that_is_cut_in_the_middle_is_no_page(files, memory):
    with line(files.port) as between:
        tier, space, (key,) = opened(between.port), new_space(), chain("a", 1)
        write(tier, memory, space, [key])
        size = PAGE_NBYTES + 64
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nLast-Modified: Sun, 22 Nov 2026 10:00:00 GMT\r\n\r\n"
        between.answer = lambda request: head.encode() + bytes(100) if request.startswith(b"GET") else None
        assert "cut" in refused(lambda: read(tier, memory, space, [key]), cause="unavailable")
        between.answer = lambda request: None
        assert read(tier, memory, space, [key]) == [True]
        tier.close()


def test_a_host_whose_clock_is_wrong_is_told_so(gateway):
    program = (
        "import sys; from tiers.s3_servers import opened\n"
        "from store_client.tiers.base import TierError\n"
        "try: opened(int(sys.argv[1]))\n"
        "except TierError as error: print(error.cause, error.lasting, error)"
    )
    said = skewed(program, gateway.port, "+2h")
    assert said.startswith("denied False") and "the clock of this host is wrong" in said


def test_http_is_spoken_where_it_is_configured_alone(gateway, monkeypatch):
    with line(gateway.port) as between:
        environment(monkeypatch, AWS_ENDPOINT_URL=f"http://127.0.0.1:{between.port}", AWS_ALLOW_HTTP="true")
        text = refused(lambda: opened(0, endpoint=None), cause="error", lasting=True)
        assert "`endpoint`" in text and between.seen == []


def test_the_environment_does_not_lead_a_configured_tier_elsewhere(gateway, monkeypatch):
    with line(gateway.port) as between:
        elsewhere = f"http://127.0.0.1:{between.port}"
        environment(
            monkeypatch, AWS_ENDPOINT_URL=elsewhere, AWS_ENDPOINT_URL_S3=elsewhere, AWS_ENDPOINT=elsewhere,
            AWS_BUCKET="other", AWS_DEFAULT_REGION="eu-west-1",
        )  # fmt: skip
        tier = opened(gateway.port)
        assert contains(tier, new_space(), chain("a", 1)) == [False] and between.seen == []
        tier.close()


def test_no_credentials_at_all(gateway, monkeypatch):
    """As on a host without a role: what would give them is not there."""
    with line(1) as nobody:
        port = nobody.port
    environment(
        monkeypatch, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", AWS_METADATA_ENDPOINT=f"http://127.0.0.1:{port}"
    )
    refused(lambda: opened(gateway.port, timeout_s=5.0), cause="unavailable")


SECRETS = {
    "key": "KEYIDHUSHHUSHHUSH", "secret": "secret-hush-hush", "token": "token-hush-hush", "word": "word-hush-hush",
}  # fmt: skip


@pytest.mark.parametrize("how", ["echoed", "refused", "unknown", "silent", "endpoint", "garbage"])
def test_secrets_are_in_no_message_log_or_figure(files, memory, monkeypatch, caplog, how):
    """Whatever a store answers, and wherever a person put a secret, it goes nowhere."""
    words = SECRETS["word"]
    environment(
        monkeypatch, AWS_ACCESS_KEY_ID=SECRETS["key"], AWS_SECRET_ACCESS_KEY=SECRETS["secret"],
        AWS_SESSION_TOKEN=SECRETS["token"],
    )  # fmt: skip
    caplog.set_level(logging.DEBUG)
    said = []
    with line(files.port) as between:
        tier, space, keys = opened(between.port, name=f"hush-{how}"), new_space(), chain("a", 3)
        write(tier, memory, space, keys)
        more = f"<AWSAccessKeyId>{SECRETS['key']}</AWSAccessKeyId><S>{SECRETS['secret']}</S><T>{SECRETS['token']}</T>"
        answers = {
            "echoed": lambda request: refusal("403 " + words, "SignatureDoesNotMatch", more) + request,
            "refused": lambda request: refusal("500 " + words, words, more),
            "unknown": lambda request: refusal("418 " + words, "Teapot", more),
            "garbage": lambda request: b"HTTP/9 " + words.encode() + request,
            "silent": lambda request: None,
            "endpoint": lambda request: None,
        }
        between.answer = answers[how]
        if how == "silent":
            between.hold()
        if how == "endpoint":
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{words}:{words}@no.such.host.invalid/{words}")
        calls = [
            lambda: read(tier, memory, space, keys),
            lambda: tier.remove(space, keys, deadline_s=0.5 if how == "silent" else DEADLINE_S),
            lambda: opened(between.port, timeout_s=0.5, **({"endpoint": None} if how == "endpoint" else {})),
        ]
        for call in calls[how == "silent" :]:
            try:
                call()
            except TierError as error:
                said += [str(error), repr(error), repr(error.__cause__)]
        said += [repr(tier.stats()), repr(tier), repr(tier._bucket), caplog.text]
        between.answer = lambda request: None
        between.release()
        tier.close()
    assert len(said) > 4, "nothing failed"
    for secret in SECRETS.values():
        assert secret not in "\n".join(said)


def test_keys_of_a_profile_are_used(gateway, monkeypatch, tmp_path):
    keys = tmp_path / "credentials"
    keys.write_text(f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n[kv]\naws_access_key_id = {KEY_ID}\n"
                    f"aws_secret_access_key = {SECRET}\n")  # fmt: skip
    nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    environment(monkeypatch, AWS_SHARED_CREDENTIALS_FILE=str(keys), AWS_PROFILE="kv", **nothing)
    tier = opened(gateway.port)
    assert contains(tier, new_space(), chain("a", 1)) == [False]
    tier.close()
    environment(monkeypatch, AWS_SHARED_CREDENTIALS_FILE=str(keys), **nothing)
    refused(lambda: opened(gateway.port), cause="denied", lasting=True)


def test_keys_that_end_are_taken_anew_from_the_file(gateway, monkeypatch, tmp_path):
    """Those of a session are good for hours, and others write the file while the tier is in use."""
    monkeypatch.setattr("store_client.tiers.object.credentials._KEPT_S", 0.0)
    keys = tmp_path / "credentials"
    environment(
        monkeypatch, AWS_SHARED_CREDENTIALS_FILE=str(keys), AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY=""
    )  # fmt: skip

    def become(secret: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {secret}\n")
        time.sleep(AGAIN_S)

    become(SECRET)
    tier, space, chained = opened(gateway.port), new_space(), chain("a", 1)
    keys.write_text("[default]\n")
    time.sleep(AGAIN_S)
    assert contains(tier, space, chained) == [False], "half a file changes nothing"
    become("those-that-have-ended")
    refused(lambda: contains(tier, space, chained), cause="denied", lasting=True)
    become(SECRET)
    assert contains(tier, space, chained) == [False]
    tier.close()


def test_where_keys_are_looked_for(tmp_path):
    file = tmp_path / ".aws" / "credentials"
    file.parent.mkdir()
    file.write_text("[default]\naws_access_key_id=a\naws_secret_access_key=b\naws_session_token=c\n[half]\nregion=x\n")
    home = {"HOME": str(tmp_path)}
    found = {"access_key_id": "a", "secret_access_key": "b", "session_token": "c"}
    assert shared_credentials(home) == found
    assert shared_credentials({**home, "AWS_ACCESS_KEY_ID": "z"}) == {}
    assert shared_credentials({**home, "AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}) == {}
    assert shared_credentials({"HOME": "/nowhere"}) == {}
    for profile in ("half", "none"):
        text = refused(lambda: shared_credentials({**home, "AWS_PROFILE": profile}), cause="denied", lasting=True)  # noqa: B023
        assert "export-credentials" in text
    file.write_text("[default\nhush-hush-hush")
    assert shared_credentials(home) == {}
    assert "hush" not in refused(lambda: shared_credentials({**home, "AWS_PROFILE": "x"}), cause="denied", lasting=True)


def test_pieces_are_left_alone_for_a_miss(files, memory):
    tier, space = opened(files.port), new_space()
    place = memory.page(PAGE_NBYTES)
    before = place[0].copy()
    assert tier.read(space, [Target(chain("a", 1)[0], place)], nbytes=PAGE_NBYTES, deadline_s=DEADLINE_S) == [None]
    assert np.array_equal(place[0], before)
    tier.close()
