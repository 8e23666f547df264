"""Several threads may be the first to read a kind of message: those that connect to peers, and those that listen."""

import subprocess
import sys
from pathlib import Path

import pytest
from long_form import LONG

ROUNDS = 400 if LONG else 150
TESTS = Path(__file__).resolve().parents[1]
CALLS = {
    "transports.local": "partial(module.decode_endpoint, encode(module.LocalEndpoint('boot', '0' * 32, bytes(16))))",
    "transports.network": "partial(module.decode_endpoint, encode(module.NetworkEndpoint([('::1', 1)], bytes(16))))",
    "control.directory": "partial(module.decode_card, encode(module.InstanceCard('e', [card(module)])))",
    "control.handshake": "partial(greet, module, module.Client(module.Identity(), 'x').start())",
}
PROGRAM = """
import importlib, sys, threading
from functools import partial
from msgspec.msgpack import encode
from simulated.sides import SMALL_RANK
import transfer.{name}

def card(module):
    return module.RankCard("127.0.0.1", 1, bytes(16), SMALL_RANK)

def greet(module, said):
    assert module.Server(module.Identity(), "x").receive(said)

def together(barrier, call):
    barrier.wait()
    call()
    done.append(None)

done = []
sys.setswitchinterval(1e-6)
for _ in range({rounds}):
    module = importlib.reload(transfer.{name})
    barrier, call = threading.Barrier(4), {call}
    threads = [threading.Thread(target=together, args=(barrier, call)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(done))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_threads_that_read_a_kind_of_message_first_at_the_same_time(name):
    """msgspec looks at a type when it is used first, and ends the process where another thread uses it meanwhile."""
    program = PROGRAM.format(name=name, call=CALLS[name], rounds=ROUNDS)
    result = subprocess.run([sys.executable, "-c", program], cwd=TESTS, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, f"{4 * ROUNDS}\n"), result.stderr
