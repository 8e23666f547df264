"""What went wrong with a request to an object store, in words that are ours alone.

Nothing of what the store or the package that speaks to it says is passed on but an HTTP status and the name of an S3
error: their texts may quote keys, tokens, signed addresses and what a stranger's server chose to answer.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

from obstore.exceptions import AlreadyExistsError, PreconditionError

from store_client.tiers.base import TierError

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_CREDENTIALS_FROM = re.compile(r"Error performing [A-Z]+ http://(169\.254\.169\.254|169\.254\.170\.2|\[?fd00:ec2)")

_NO_CREDENTIALS = (
    "none in the environment, none in ~/.aws/credentials, no role of this machine: set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY"
)
_NO_BUCKET = ("NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "AuthorizationHeaderMalformed")
_NETWORK = {
    "dns error": "its name is not known", "ConnectionRefused": "nothing listens there",
    "ConnectionReset": "the connection was cut", "IncompleteMessage": "the connection was cut",
    "IncompleteBody": "the connection was cut", "InvalidContentType": "it does not speak TLS",
    "InvalidCertificate": "its certificate is not trusted", "kind: Connect": "it cannot be connected to",
}  # fmt: skip


class Trouble(NamedTuple):
    """Why a request failed: the cause for metrics, the words for a person."""

    cause: str
    text: str
    lasting: bool = False

    def error(self, where: str) -> TierError:
        return TierError(f"{where}: {self.text}", self.cause, lasting=self.lasting)


LATE = Trouble("timeout", "no answer in time")


def is_there_already(error: BaseException) -> bool:
    """Whether a conditional put was refused since there is such an object."""
    if isinstance(error, (AlreadyExistsError, PreconditionError)):
        return True
    return _first(_STATUS, str(error)) == "409"  # AWS's word for two conditional puts at a time


def knows_no_condition(error: BaseException) -> bool:
    """Whether the server refuses conditional puts as such."""
    return _first(_STATUS, str(error)) == "501"


def is_missing(error: BaseException) -> bool:
    """Whether there is no such object; a bucket that is missing is another matter."""
    return isinstance(error, FileNotFoundError) and _first(_CODE, str(error)) not in _NO_BUCKET


def trouble(error: BaseException) -> Trouble:
    """What an exception of a request means."""
    if isinstance(error, asyncio.TimeoutError):
        return LATE
    text = str(error)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    shown = " ".join(filter(None, (status and f"status {status}", code)))
    if _CREDENTIALS_FROM.search(text):
        return Trouble("denied", f"this host has no credentials for it ({_NO_CREDENTIALS})")
    if code == "RequestTimeTooSkewed":
        return Trouble("denied", f"refused ({shown}): the clock of this host is wrong, set it (NTP)")
    if code in _NO_BUCKET or status in ("301", "404") or "BareRedirect" in text:
        remedy = "make it, or correct `url`, `endpoint` or `region`"
        return Trouble("unavailable", f"there is no such bucket ({shown or 'moved'}): {remedy}", lasting=True)
    if status in ("401", "403") or code in ("ExpiredToken", "InvalidToken"):
        remedy = "check the credentials, and that they may list the bucket and get, put and delete objects"
        return Trouble("denied", f"refused ({shown}): {remedy}", lasting=True)
    if status == "507" or code in ("QuotaExceeded", "XMinioStorageFull"):
        return Trouble("full", f"it is full ({shown})")
    if status == "408" or "TimedOut" in text:
        return LATE
    if status == "429" or status.startswith("5"):
        return Trouble("unavailable", f"it is overloaded or out of order ({shown})")
    if "BadScheme" in text:
        return Trouble("error", "its address is no https address; an http one must be set as `endpoint`", lasting=True)
    for sign, words in _NETWORK.items():
        if sign in text:
            return Trouble("unavailable", words)
    return Trouble("error", f"the request failed ({shown or type(error).__name__})")


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
