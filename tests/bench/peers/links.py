"""Transfers over a network: striped over two links, one of them cut, and layers sent while the next is computed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.peers import children
from bench.peers.network import LINK_GBITS, LINKS, Network, network
from bench.peers.report import Goal, Row, row
from mooncake_connector.cli.bench.measure import BenchError, Progress

_ANSWER_S = 300.0
LAYER_S, LAYER_KV_S = 0.020, 0.015
SCHEDULES = (("layer", 1), ("full", 1), ("chunk", 4), ("layer", 4))
"""Granularity, and in how many passes of prefill the prompt is computed."""


@dataclass(frozen=True)
class LinkScale:
    """How much is moved over the links."""

    nbytes: int = 256 << 20
    rounds: int = 3
    lost_after_s: float = 5.0
    layers: int = 32


QUICK = LinkScale(nbytes=48 << 20, rounds=1, lost_after_s=1.0, layers=4)


@dataclass(frozen=True)
class LinkFigures:
    """Times in seconds."""

    striped: float
    after_cut: float
    """From the cut to the end of the transfer."""
    right_share: float
    """1.0 if what arrived after the cut is what was sent."""
    last_byte: dict[tuple[str, int], float]
    """From the last layer to the last byte, by schedule."""


def measure(scale: LinkScale, progress: Progress) -> LinkFigures | None:
    """None, and a warning, where no network namespaces can be made."""
    try:
        with network() as net, _ends(net, scale) as (holder, sender):
            num_paths = len(sender.ask(do="connect", **holder.ask(do="offer"))["paths"])
            sender.ask(do="write")  # the congestion windows open
            striped = min(_checked(sender.ask(do="write"))["seconds"] for _ in range(scale.rounds))
            last_byte = _hiding(sender, scale, striped)
            after_cut = _cut(net, holder, sender, striped, num_paths)
            right = holder.ask(do="digest") == sender.ask(do="digest")
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        progress(f"WARNING: the rows over a network are left out: {error}")
        return None
    return LinkFigures(striped, after_cut, float(right), last_byte)


def rows(figures: LinkFigures | None, scale: LinkScale) -> list[Row]:
    """None where the links could not be made."""
    if figures is None:
        return []
    striped = scale.nbytes * 8 / figures.striped / 1e9
    cut = "tcp: one of the two links cut in mid-transfer"
    found = [
        row("tcp: striped over two links", striped, "Gbit/s", limit=LINKS * LINK_GBITS, goal=Goal(at_least=1.8)),
        row(f"{cut}: what arrived right", 100 * figures.right_share, "%", goal=Goal(at_least=100)),
        row(f"{cut}: from the cut to the end", figures.after_cut, "s"),
    ]
    for (granularity, passes), seconds in figures.last_byte.items():
        computed = "one pass" if passes == 1 else f"{passes} passes"
        figure = (
            f"{granularity}: last byte after the last of {scale.layers} layers, {LAYER_S * 1e3:g} ms each in {computed}"
            f", KV {LAYER_KV_S * 1e3:g} ms"
        )
        goal = Goal(at_most=LAYER_S * 1e3) if (granularity, passes) == ("layer", 1) else None
        found.append(row(figure, seconds * 1e3, "ms", goal=goal))
    return found


def _hiding(sender: _End, scale: LinkScale, striped: float) -> dict[tuple[str, int], float]:
    """With layers whose KV takes as long as the goal says, at the speed that was just measured."""
    layer_nbytes = int(scale.nbytes / striped * LAYER_KV_S)
    num_layers = min(scale.layers, scale.nbytes // layer_nbytes)
    order = {"num_layers": num_layers, "layer_nbytes": layer_nbytes, "layer_s": LAYER_S}
    return {
        (granularity, passes): _checked(sender.ask(do="layers", granularity=granularity, passes=passes, **order))[
            "seconds"
        ]
        for granularity, passes in SCHEDULES
    }


def _cut(net: Network, holder: _End, sender: _End, striped: float, num_paths: int) -> float:
    """Let one link die in mid-transfer; seconds from then to the end."""
    for part in (3, 6, 12):
        holder.ask(do="clear")
        sender.tell(do="write")
        time.sleep(striped / part)
        net.set_link(1, "down")
        cut_at = time.perf_counter()
        answer = _checked(sender.answer())
        if len(answer["paths"]) < num_paths:
            return time.perf_counter() - cut_at
        net.set_link(1, "up")  # the transfer was over before the link was cut
    raise BenchError("the transfer was over before the link was cut, three times")


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["outcome"] != "ok":
        raise BenchError(f"a transfer over the links failed: {answer['outcome']}")
    return answer


class _End:
    """A process of `network_child`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.answer()

    def tell(self, **order: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout
        patience = threading.Timer(_ANSWER_S, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        if not line:
            raise BenchError("a process at the end of the links died, or hung: its messages are above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def _ends(net: Network, scale: LinkScale) -> Iterator[tuple[_End, _End]]:
    secret = secrets.token_hex(16)
    roles = (("hold", net.there, net.targets), ("send", net.here, net.sources))
    with contextlib.ExitStack() as stack:
        made = []
        for role, namespace, hosts in roles:
            order = {"role": role, "hosts": hosts, "secret": secret, "nbytes": scale.nbytes}
            order["lost_after_s"] = scale.lost_after_s
            process = subprocess.Popen(
                net.inside(namespace, children.module(sys.executable, "network_child", order)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **children.path()},
            )
            stack.callback(_kill, process)
            made.append(_End(process))
        yield made[0], made[1]


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe:
                pipe.close()
