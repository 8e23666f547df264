"""Where an object store's credentials come from: the places that AWS's own tools look in. They are in no message.

The package that speaks to the store (obstore) takes the environment's keys, a web identity, a container's role and an
instance's role by itself. It does not read the file of shared credentials, so keys that stand in it are read here,
again and again: some end after hours, and whoever renews them writes that file.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from store_client.tiers.base import TierError

_KEYS = {
    "access_key_id": "aws_access_key_id", "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}  # fmt: skip
_BY_OBSTORE = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""Where one of these is set, the file is not asked."""
_LIMIT_NBYTES = 1 << 20
_KEPT_S = 360.0
"""The package asks again five minutes before: keys are read once a minute."""


class SharedCredentials:
    """`shared_credentials` as `S3Store` wants them: called for each minute's requests, in any thread. While the file
    has no keys, perhaps since it is just being written, those that it had last are used.

    Raises TierError as `shared_credentials`, when it is made.
    """

    def __init__(self) -> None:
        self._keys = shared_credentials()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._keys)

    def __call__(self) -> Any:
        with suppress(TierError):
            self._keys = shared_credentials() or self._keys
        return {
            "access_key_id": self._keys["access_key_id"],
            "secret_access_key": self._keys["secret_access_key"],
            "token": self._keys.get("session_token"),
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=_KEPT_S),
        }


def shared_credentials(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Keys of the profile in use (AWS_PROFILE, else "default") from AWS_SHARED_CREDENTIALS_FILE, else
    ~/.aws/credentials, as `access_key_id`, `secret_access_key` and maybe `session_token`.

    Empty where the environment has credentials of its own, or where there is no such file or profile.
    Raises TierError, lasting, where AWS_PROFILE names a profile that has no keys there.
    """
    if any(environment.get(name) for name in _BY_OBSTORE):
        return {}
    asked = environment.get("AWS_PROFILE", "")
    named = environment.get("AWS_SHARED_CREDENTIALS_FILE", "")
    path = Path(named) if named else Path(environment.get("HOME") or "/") / ".aws" / "credentials"
    section = _profile(path, asked or "default")
    found = {ours: section[theirs] for ours, theirs in _KEYS.items() if section.get(theirs)}
    if "access_key_id" in found and "secret_access_key" in found:
        return found
    if asked:
        raise TierError(
            f"AWS_PROFILE is set, but that profile has no aws_access_key_id and aws_secret_access_key in {path}: add "
            "them, or export what the profile stands for (aws configure export-credentials --format env)",
            "denied", lasting=True,
        )  # fmt: skip
    return {}


def _profile(path: Path, name: str) -> Mapping[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_string(file.read(_LIMIT_NBYTES))
        return dict(parser[name])
    except (OSError, UnicodeDecodeError, configparser.Error, KeyError):  # their text may quote the file
        return {}
