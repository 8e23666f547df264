"""A prefill and a decode instance in one process, and the few lines of a proxy between them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
from harness import PATIENCE_S, Engine

from vllm_plugin.connector import MooncakeKVConnector

PROMPT = [token % oracle.VOCAB for token in range(7, 7 * 84, 7)]
"""Five blocks of 16 tokens, and three tokens more."""
PD_ONLY: dict[str, Any] = {"prefix_reuse": False}
GRANULARITIES = ["full", "chunk", "layer"]
ORDERS = ["sequential", "concurrent"]
every_order = pytest.mark.parametrize("order", ORDERS)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)

_numbers = itertools.count()


def step_all(*engines: Engine) -> bool:
    """One step of each engine; False where none has anything left to do."""
    done = [engine.step() for engine in engines]
    if max(done) >= 0:
        engines[0].pause(max(done))
    return max(done) >= 0


def run_all(*engines: Engine, until: Callable[[], Any] | None = None) -> None:
    """Step all engines until none has anything left to do, blocks that are held included, or until `until()`."""
    end_s = time.monotonic() + PATIENCE_S
    while until is None or not until():
        if not step_all(*engines):
            assert until is None or until(), "all engines went idle before what was waited for"
            return
        assert time.monotonic() < end_s, f"stuck: {[list(engine.scheduler.requests) for engine in engines]}"


def prefill_params(transfer_id: str | None = None) -> dict[str, Any]:
    """What a proxy says to the prefill instance; with a transfer of its own in the concurrent order."""
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    return params if transfer_id is None else params | {"transfer_id": transfer_id}


def decode_params(prefill: Engine, transfer_id: str) -> dict[str, Any]:
    """What a proxy says to the decode instance in the concurrent order."""
    where = {"remote_host": "127.0.0.1", "remote_port": port_of(prefill)}
    return {"do_remote_prefill": True, "transfer_id": transfer_id} | where


def port_of(engine: Engine) -> int:
    return int(engine.pd._directory.port)


def node_of(engine: Engine, rank: int = 0) -> Any:
    return engine.workers[rank].pd._node


def transfers_of(engine: Engine) -> list[Any]:
    """What the producer's side of the first rank knows."""
    return list(node_of(engine)._serving.producer._transfers.values())


def jobs(engine: Engine) -> list[Any]:
    """What an engine asked its workers to fetch, into the blocks of its first group."""
    return [tables[0] for step in engine.metadata for tables in step.pd.granted.values()]


def granted(engine: Engine, transfer_id: str = "") -> bool:
    """Whether a decode instance has said where KV may be written."""
    known = [one for one in transfers_of(engine) if one.name.startswith(transfer_id)]
    return any(session.granted for one in known for session in list(one.sessions.values()))


def last(engine: Engine) -> str:
    """The newest request."""
    return list(engine.requests)[-1]


@dataclass
class Pair:
    """A prefill and a decode instance."""

    prefill: Engine
    decode: Engine

    @property
    def both(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def handed_over(self, prompt: Sequence[int], max_tokens: int = 1, **kwargs: Any) -> dict[str, Any]:
        """Prefill, and the answer: parameters for the decode instance."""
        name = self.prefill.add(prompt, max_tokens, params=prefill_params(), **kwargs)
        run_all(*self.both, until=lambda: name in self.prefill.reasons)
        answer = self.prefill.answers[name]
        assert answer is not None, "the prefill instance did not hand its KV over"
        return answer

    def add(self, prompt: Sequence[int], max_tokens: int = 3, *, order: str = "sequential", **kwargs: Any) -> str:
        """A request of a client, as far as the proxy brings it at once; its name at the decode instance."""
        if order == "sequential":
            params = self.handed_over(prompt)
        else:
            transfer_id = f"both-{next(_numbers)}"
            self.prefill.add(prompt, 1, params=prefill_params(transfer_id))
            params = decode_params(self.prefill, transfer_id)
        return self.decode.add(prompt, max_tokens, params=params, **kwargs)

    def add_granted(self, prompt: Sequence[int], max_tokens: int = 3) -> str:
        """In the concurrent order, before the prefill instance has computed anything.

        Returns its name at the decode instance; at the prefill instance it is the last request.
        """
        name = self.decode.add(prompt, max_tokens, params=decode_params(self.prefill, "x"))
        run_all(self.decode, until=lambda: granted(self.prefill))
        self.prefill.add(prompt, 1, params=prefill_params("x"))
        return name

    def add_computed(self, num_tokens: int = 32) -> str:
        """As `add_granted`, and so many tokens of PROMPT are computed."""
        name = self.add_granted(PROMPT)
        leg = last(self.prefill)
        run_all(*self.both, until=lambda: self.prefill.computed(leg) >= num_tokens)
        return name

    def ask(self, prompt: Sequence[int], max_tokens: int = 3, *, computed: int | None = None, **kwargs: Any) -> str:
        """A request from its arrival to its end, see `finish`; its name at the decode instance."""
        name = self.add(prompt, max_tokens, **kwargs)
        self.finish(name, computed=computed)
        return name

    def run(self) -> None:
        run_all(*self.both)

    def finish(self, *names: str, computed: int | None = None) -> None:
        """Decode answers as the model, having computed so many tokens (unless None); nothing is left over."""
        self.run()
        for name in names:
            self.decode.check_answer(name, computed)
        self.check_at_rest()

    def check_at_rest(self) -> None:
        """Nothing is left over, and nobody waited for the end of a lease where that is far away."""
        for engine in self.both:
            engine.check_at_rest()
        if not any({"transfer_lease_s", "transfer_deadline_s"} & engine.setup.extra.keys() for engine in self.both):
            assert not {"send_expired", "fetch_expired"} & self.failures().keys()

    def failures(self) -> dict[str, int]:
        """By cause, of both."""
        return {cause: count for engine in self.both for cause, count in figures(engine).get("failures", {}).items()}


def figures(engine: Engine) -> dict[str, Any]:
    """Sums of all that our connector reported to an engine."""
    reported = [stats.kv_connector_stats for stats in engine.stats if stats.kv_connector_stats]
    data = engine.connector.build_kv_connector_stats()
    for one in reported:
        data.aggregate(engine.connector.build_kv_connector_stats(one if isinstance(one, dict) else one.data))
    sums = data.data.get(MooncakeKVConnector.__name__, data)  # of one of several
    return dict(sums.data)


MakePair = Callable[..., Pair]
