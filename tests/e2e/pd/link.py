"""A network link between two network namespaces that can be cut, lose and delay packets; runs as root, needs no netem.

    link.py NAMESPACE=ADDRESS/BITS NAMESPACE=ADDRESS/BITS

Each end is a TUN device, and this process carries what comes out of one into the other. It takes one JSON object a line
on its standard input, `{"lose": 0.02, "delay_ms": 20, "cut": false}`, and answers each with a line; a key that is left
out has its default (0, 0, false). It ends with its input.
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
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
NAME = "pdlink"
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


def main(ends: list[str]) -> None:
    here, there = (open_end(*end.split("=", 1)) for end in ends)
    other = {here: there, there: here}
    watched = selectors.DefaultSelector()
    for readable in (here, there, 0):
        watched.register(readable, selectors.EVENT_READ)
    lose, delay_s, cut = 0.0, 0.0, False
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
                lose, delay_s = order.get("lose", 0.0), order.get("delay_ms", 0.0) / 1000
                cut = order.get("cut", False)
                print("done", flush=True)
                continue
            for _ in range(64):
                try:
                    packet = os.read(key.fd, MTU + 100)
                except BlockingIOError:
                    break
                if not cut and drawn.random() >= lose:
                    heapq.heappush(under_way, (time.monotonic() + delay_s, next(numbers), other[key.fd], packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, target, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # its queue is full: the packet is lost
                os.write(target, packet)


if __name__ == "__main__":
    main(sys.argv[1:3])
