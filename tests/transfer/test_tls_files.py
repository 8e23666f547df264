"""Files that the process that does TLS cannot use any more when it reads them."""

import os
import subprocess
from pathlib import Path

import pytest
from certificates import CAN_MAKE
from simulated.tls_process import Pair

from transfer.transports.base import TransferError, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

pytestmark = [
    pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`"),
    pytest.mark.usefixtures("anew"),
]


def test_files_that_have_gone_meanwhile_are_named(stack, files, tmp_path):
    """They are read when the process is started, or first used there."""
    copies = copied(files, tmp_path)
    pair = Pair(stack, files)
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**copies)))
    os.unlink(copies["key"])
    with pytest.raises(Unavailable, match=f"TLS files .*{copies['key']}.* cannot be used"):
        sender.connect(pair.endpoint, deadline_s=60)


def test_a_key_that_is_locked_meanwhile_is_refused_and_others_go_on(stack, files, tmp_path):
    """Asked for its passphrase on its standard input, the process took what the engine hands over for the answer."""
    copies = copied(files, tmp_path)
    pair = Pair(stack, files)
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**copies)))
    lock = ["openssl", "ec", "-in", files["key"], "-aes256", "-passout", "pass:unknown", "-out", copies["key"]]
    subprocess.run(lock, check=True, capture_output=True)
    with pytest.raises(Unavailable, match=r"TLS files .* cannot be used"):
        sender.connect(pair.endpoint, deadline_s=10)
    assert pair.connect().alive


@pytest.mark.parametrize("role", ["certificate", "key", "authority"])
def test_a_pipe_is_no_file_also_where_it_took_the_place_of_one(stack, files, tmp_path, role):
    """Who opens one waits until somebody writes to it."""
    copies = copied(files, tmp_path)
    pair = Pair(stack, files)
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**copies)))
    os.unlink(copies[role])
    os.mkfifo(copies[role])
    with pytest.raises(TransferError, match=f"{copies[role]} is no regular file"):
        TcpTransport(Memory(), tls=Tls(**copies))
    with pytest.raises(Unavailable, match=f"{copies[role]} is no regular file"):
        sender.connect(pair.endpoint, deadline_s=60)
    assert pair.connect().alive


def copied(files, folder):
    copies = {}
    for role, path in files.items():
        copies[role] = str(folder / role)
        Path(copies[role]).write_bytes(Path(path).read_bytes())
    return copies


def test_a_reason_that_names_the_longest_paths_is_told_whole(stack, files, tmp_path):
    """Each letter of these takes 6 bytes on the way; a reason that was cut off there ended the sender's thread."""
    folder = tmp_path.joinpath(*["\u00e4" * 120] * 3)
    folder.mkdir(parents=True)
    copies = copied(files, folder)
    pair = Pair(stack, files)
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**copies)))
    os.unlink(copies["key"])
    with pytest.raises(Unavailable, match="TLS files"):
        sender.connect(pair.endpoint, deadline_s=60)
    assert pair.connect().alive


def test_relative_paths_count_from_where_the_transport_was_made(stack, files, tmp_path, monkeypatch):
    copies = copied(files, tmp_path)
    pair = Pair(stack, files)
    monkeypatch.chdir(tmp_path)
    relative = Tls(**{role: os.path.basename(path) for role, path in copies.items()})
    sender = stack.enter_context(TcpTransport(Memory(), tls=relative))
    monkeypatch.chdir("/")
    assert sender.connect(pair.endpoint, deadline_s=60).alive
