"""A network of network namespaces that can be cut, lose and delay packets; runs as root, needs no netem.

    link.py NAMESPACE=ADDRESS/BITS...

Each end is a TUN device, and this process carries what comes out of one into the one with the address it is meant for.
It takes one JSON object a line on its standard input and answers each with one; a key that is left out has its default:
- `lose`: the share of packets that are lost (0), and `delay_ms` how much later the others arrive (0),
- `cut`: addresses that nothing comes from or goes to ([]), and `cut_after`: those for which this begins once so many
  bytes were carried to them ({}).
The answer is the list of all addresses that are cut by now. It ends with its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
NAME = "net0"
MTU = 9000


def open_end(namespace: str, address: str) -> int:
    """A TUN device in the namespace, up and with its address."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(f"/run/netns/{namespace}", os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", NAME.encode(), IFF_TUN | IFF_NO_PI))
    for command in (f"addr add {address} dev {NAME}", f"link set {NAME} mtu {MTU} up"):
        subprocess.run(["ip", *command.split()], check=True)
    return device


def main(arguments: list[str]) -> None:
    ends: dict[bytes, int] = {}  # by address
    for namespace, _, address in (argument.partition("=") for argument in arguments):
        ends[socket.inet_aton(address.partition("/")[0])] = open_end(namespace, address)
    address_of = {device: address for address, device in ends.items()}
    watched = selectors.DefaultSelector()
    for readable in (*address_of, 0):
        watched.register(readable, selectors.EVENT_READ)
    lose, delay_s = 0.0, 0.0
    cut: set[bytes] = set()
    cut_after: dict[bytes, int] = {}
    under_way: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    drawn = random.Random(0)
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in watched.select(wait_s):
            if key.fd == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                order = json.loads(line)
                if order is not None:
                    lose, delay_s = order.get("lose", 0.0), order.get("delay_ms", 0.0) / 1000
                    cut = {socket.inet_aton(address) for address in order.get("cut", ())}
                    cut_after = {socket.inet_aton(one): left for one, left in order.get("cut_after", {}).items()}
                print(json.dumps([socket.inet_ntoa(address) for address in cut]), flush=True)
                continue
            source = address_of[key.fd]
            for _ in range(64):
                try:
                    packet = os.read(key.fd, MTU + 100)
                except BlockingIOError:
                    break
                target = packet[16:20]  # of IPv4; anything else finds nobody
                if target not in ends or cut & {source, target} or drawn.random() < lose:
                    continue
                heapq.heappush(under_way, (time.monotonic() + delay_s, next(numbers), ends[target], packet))
                if target in cut_after:
                    cut_after[target] -= len(packet)
                    if cut_after[target] < 0:
                        del cut_after[target]
                        cut.add(target)
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, device, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # its queue is full, or it is down: the packet is lost
                os.write(device, packet)


if __name__ == "__main__":
    main(sys.argv[1:])
