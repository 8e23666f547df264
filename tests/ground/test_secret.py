"""The shared secret is read from a file that is its owner's alone, and is shown to nobody."""

import os
import socket

import pytest

from mooncake_connector.config.secret import read_secret
from mooncake_connector.errors import ConfigError

SECRET = b"correct horse battery staple"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_white_space_around_the_secret_is_left_out_and_a_link_to_the_file_will_do(path, tmp_path, mode):
    path.write_bytes(b" \n" + SECRET + b"\r\n")
    path.chmod(mode)
    (tmp_path / "link").symlink_to(path)
    assert read_secret(path) == read_secret(tmp_path / "link") == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644])
def test_a_file_that_others_may_use_is_refused_with_its_mode_and_what_to_do(path, mode):
    path.write_bytes(SECRET)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_secret(path)
    message = str(caught.value)
    assert f"{path} has mode {mode:04o}" in message and f"chmod 600 {path}" in message
    assert SECRET.decode() not in message


@pytest.mark.parametrize("content", [b"", b"x" * 15, b" " * 100, b"\t" + b"x" * 15 + b"\n" * 20])
def test_too_short_a_secret_is_refused_with_its_length_and_not_shown(path, content):
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_secret(path)
    message = str(caught.value)
    assert f"{path} holds {len(content.strip())} bytes" in message and "at least 16" in message
    assert "xxx" not in message


def test_sixteen_bytes_are_enough_and_4096_not_too_many(path):
    for length in (16, 4096):
        path.write_bytes(b"x" * length)
        assert read_secret(path) == b"x" * length
    path.write_bytes(b"x" * 4097)
    with pytest.raises(ConfigError, match="more than 4096 bytes"):
        read_secret(path)


def test_a_file_that_is_not_there_is_refused_with_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r"absent cannot be read: No such file.*; create it"):
        read_secret(tmp_path / "absent")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="pipe is no regular file"):
        read_secret(tmp_path / "pipe")
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="folder is no regular file"):
        read_secret(tmp_path / "folder")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(ConfigError, match="socket cannot be read"):
            read_secret(tmp_path / "socket")
