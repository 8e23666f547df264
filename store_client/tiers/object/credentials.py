"""Where an object store's credentials come from: the places that AWS's own tools look in. They are in no message.

The package that speaks to the store (obstore) takes the environment's keys, a web identity, a container's role and an
instance's role by itself. It does not read the file of shared credentials, so keys that stand in it are read here.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

from store_client.tiers.base import TierError

_KEYS = {
    "access_key_id": "aws_access_key_id", "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}  # fmt: skip
_BY_OBSTORE = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""Where one of these is set, the file is not asked."""
_LIMIT_NBYTES = 1 << 20


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
