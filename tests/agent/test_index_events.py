"""What engines hold in memory of their own, by their KV events, against what they really hold."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from agent.asking import prompt, store_prompt
from agent.publisher import CLEARED, Publisher, packed, removed, stored
from agent.stand_in import CAPACITY, until
from agent.test_index import served, serving

from store_client import EmbeddedStore
from store_client.agent.index.events import Junk, read_batch
from store_client.agent.index.hashes import seq_hashes
from store_client.agent.index.held import Context, Entries, Held, union
from store_client.agent.index.index import Instance
from store_client.agent.index.requests import Registration
from store_client.agent.index.stream import Stream

__all__ = ["served"]

TOKENS = prompt(2, 160)
HASHES = [bytes([i]) * 32 for i in range(10)]
BLOCKS = [TOKENS[i : i + 16] for i in range(0, 160, 16)]


class Told:
    """A stream that the test feeds, and the questions that the index asks of it."""

    def __init__(self, ignored: tuple[str, ...] = (), **registered: Any) -> None:
        fields = {"instance_id": "a", "modelname": "m", "block_size": 16, "type": "vLLM", **registered}
        self.held, self.counts = Held(), Counter[str]()
        self.instance = Instance(Registration(**fields), True)
        self.stream = Stream(self.instance, self.held, frozenset(ignored), self.counts)
        self._number = 0

    def __call__(self, *events: dict[str, Any]) -> None:
        self.stream.take(self._number, read_batch(packed(*events)))
        self._number += 1

    def leading(
        self, tokens: list[int] = TOKENS, medium: str = "GPU", size: int = 16, lora: str = "", salt: str = ""
    ) -> int:
        owner = self.instance.owners.get((medium, size))
        names = seq_hashes(np.array(tokens, dtype=np.uint32), size)
        present = self.held.present(Context(size, lora, salt), names)
        return present[owner].leading if owner in present else 0


def test_blocks_follow_their_parents_and_go_when_they_are_removed():
    told = Told()
    told(stored(HASHES[:3], TOKENS[:48]))
    told(stored(HASHES[3:5], TOKENS[48:80], HASHES[2]), removed([HASHES[4], b"never stored"]))
    assert told.leading() == 4
    told(removed([HASHES[1]]))
    assert told.leading() == 1
    told(stored([HASHES[1]], BLOCKS[1], HASHES[0]))
    assert told.leading() == 4
    told(CLEARED)
    assert (told.leading(), told.held.num_blocks, told.stream.num_blocks) == (0, 0, 0)
    told.stream.close()
    assert told.instance.owners == {} and told.held.new_owner() == 0, "its number is free again"


def test_hashes_may_be_integers_of_either_sign_as_sglang_sends_them():
    told = Told(type="SGLang", block_size=64)
    told(stored([-5, 7], TOKENS[:128], size=64), stored([-5], TOKENS[:64], size=64, medium="CPU_PINNED"))
    told(removed([7]))
    assert told.leading(size=64) == 1 and told.leading(size=64, medium="CPU") == 1
    told(removed([-5], medium="CPU_PINNED"))
    assert told.leading(size=64) == 1 and told.leading(size=64, medium="CPU") == 0


def test_salts_and_adapters_have_blocks_of_their_own():
    told = Told()
    told(stored(HASHES[:2], TOKENS[:32], extra_keys=[["salty"], None]))
    told(stored([HASHES[2]], BLOCKS[2], HASHES[1]))
    told(stored([HASHES[5]], BLOCKS[0], lora_name="l", extra_keys=[["l", "salty"]]))
    told(stored([HASHES[6]], BLOCKS[0], cache_salt="of sglang"))
    assert told.leading() == 0 and told.leading(salt="salty") == 3
    assert told.leading(lora="l", salt="salty") == 1 and told.leading(salt="of sglang") == 1


def test_what_tokens_do_not_name_is_never_claimed():
    told = Told(ignored=("CPU",))
    image = [None, ["of an image", 3]]
    told(stored(HASHES[:3], TOKENS[:48], extra_keys=[None, [image], None]), stored([HASHES[3]], BLOCKS[3], HASHES[2]))
    assert told.leading() == 1, "an image's placeholders are the same for all images"
    told(stored([HASHES[7]], BLOCKS[0], b"unknown parent"))
    told(stored([HASHES[8]], BLOCKS[0], group_idx=1, kv_cache_spec_kind="sliding_window"))
    told(stored([HASHES[9]], BLOCKS[0], medium="CPU"), stored([HASHES[9]], BLOCKS[0], medium="TAPE"))
    told(stored([HASHES[9]], BLOCKS[0][:5]), stored([HASHES[9]], [-1] * 16), stored([HASHES[9]], [1 << 40] * 16))
    assert told.held.num_blocks == 1 and told.counts["unplaced_blocks"] == 5


def test_mooncakes_masters_name_blocks_by_their_rolling_hashes():
    names = seq_hashes(np.array(TOKENS, dtype=np.uint32), 16)
    envelope = {"event_id": 1, "medium": "cpu", "tenant_id": "default", "backend_id": "w", "block_size": None}
    told = Told(type="Mooncake")
    told({"event_type": "stored", "seq_hashes": names[:4], "base_block_idx": 0, **envelope})
    told({"event_type": "removed", "seq_hashes": names[3:4], **envelope})
    assert told.leading(medium="CPU") == 3
    told({"event_type": "cleared", **envelope})
    assert told.leading(medium="CPU") == 0


@pytest.mark.parametrize(
    "payload", [b"", b"\xff" * 50, b"\x91" * 100_000, b"\x93\x01\x02\x03", b"\x93\xcb\x7f\xf8\0\0\0\0\0\0\x90\xa1x"]
)
def test_what_is_no_batch_is_junk(payload):
    with pytest.raises(Junk):
        read_batch(payload)


def test_an_event_that_cannot_be_is_left_out_and_counted_and_others_of_its_batch_are_not():
    told = Told()
    told({"type": "BlockStored", "block_hashes": 3}, {"type": "Invented"}, stored(HASHES[:1], BLOCKS[0]))
    assert told.leading() == 1 and told.counts["junk"] == 1


def test_a_random_life_of_an_engine_is_what_the_index_says():
    chosen = random.Random(5)
    told, truth = Told(), dict[bytes, tuple[bytes, ...]]()
    prompts = [[prompt(100 + p, 16) for _ in range(1)] for p in range(4)]
    blocks: dict[tuple[int, ...], bytes] = {}
    for step in range(400):
        path = tuple(chosen.randrange(3) for _ in range(chosen.randint(1, 6)))
        act = chosen.random()
        if act < 0.6:
            known = [blocks.setdefault(path[: i + 1], str(path[: i + 1]).encode()) for i in range(len(path))]
            first = next((i for i, name in enumerate(known) if name not in truth), None)
            if first is not None:
                tokens = [t for i in range(first, len(path)) for t in prompts[path[i]][0]]
                told(stored(known[first:], tokens, known[first - 1] if first else None))
                truth |= {name: path[: i + 1] for i, name in enumerate(known)}
        elif act < 0.98 and truth:
            gone = chosen.sample(sorted(truth), min(len(truth), 3))
            told(removed(gone))
            for name in gone:
                del truth[name]
        elif step % 2:
            told(CLEARED)
            truth.clear()
        asked = tuple(chosen.randrange(3) for _ in range(6))
        held = [blocks.get(asked[: i + 1]) in truth for i in range(6)]
        leading = held.index(False) if False in held else 6
        assert told.leading([t for p in asked for t in prompts[p][0]]) == leading, step
    assert told.counts["unplaced_blocks"] == 0 and told.counts["stored_blocks"] > 200


def test_what_media_have_together_is_what_their_tokens_have_together():
    chosen = np.random.default_rng(3)
    for _ in range(300):
        runs, covered = [], np.zeros(400, dtype=bool)
        for step in chosen.choice([16, 24, 64], 2):
            present = chosen.random(256 // step) < 0.8
            runs.append(Entries(present, int(step)))
            tokens = np.repeat(present, step)
            assert runs[-1].tokens == int(np.append(tokens, False).argmin())
            covered[: len(tokens)] |= tokens
        assert union(runs) == int(covered.argmin())
    assert union([]) == 0


def test_owners_are_told_apart_and_go_on_behind_what_the_pool_has():
    chosen, context, names = np.random.default_rng(4), Context(16, "", ""), list(range(100, 140))
    held, owners = Held(), {}
    for owner in range(20):
        owners[owner] = chosen.random(40) < 0.9
        assert held.new_owner() == owner
        held.add(context, owner, [name for name, there in zip(names, owners[owner], strict=True) if there])
    found = held.present(context, names)
    for owner, there in owners.items():
        pages = chosen.random(10) < 0.5
        assert found[owner].leading == int(np.append(there, False).argmin())
        both = np.repeat(there, 16) | np.repeat(pages, 64)
        assert union([found[owner], Entries(pages, 64)]) == int(np.append(both, False).argmin())


# -- over sockets -------------------------------------------------------------------------------------------------


def of(client: Any, name: str, tokens: list[int]) -> dict[str, Any]:
    return dict(client.query(tokens, block_size=16)["default"][name])


def gpu(client: Any, tokens: list[int] = TOKENS) -> int:
    return int(of(client, "a", tokens)["GPU"])


def follow(client: Any, publisher: Publisher, *, replay: bool = True) -> None:
    """Registered, and heard: what is published before a subscription has come to pass is lost to it."""
    endpoints = publisher.endpoints if replay else {"endpoint": publisher.endpoints["endpoint"]}
    client.register("a", block_size=16, **endpoints)

    def heard() -> bool:
        publisher.publish(stored([b"x"], [9] * 16))
        return gpu(client, [9] * 16) == 16

    until(heard, "no event is taken in")


def metric(client: Any, what: str) -> int:
    lines = client.ask("GET", "/metrics").body.decode().splitlines()
    wanted = f'mooncake_connector_index_events_total{{what="{what}"}} '
    return int(float(next((line.removeprefix(wanted) for line in lines if line.startswith(wanted)), "0")))


def test_memory_of_engines_and_the_pool_are_put_together(served, pool):
    with Publisher() as publisher:
        follow(served, publisher)
        with EmbeddedStore(pool, CAPACITY) as store:
            store_prompt(store, TOKENS)
        publisher.publish(stored(HASHES[:5], TOKENS[:80]), stored([HASHES[8]], BLOCKS[8], HASHES[4]))
        until(lambda: gpu(served) == 80, "the blocks are not known")
        publisher.publish(stored(HASHES[5:10], TOKENS[80:160], HASHES[4]), removed(HASHES[:1]))
        answer = until(
            lambda: (found := served.query(TOKENS, block_size=16)["default"]["a"])["GPU"] == 0 and found,
            "the block is still known",
        )
        assert answer == {"longest_matched": 160, "GPU": 0, "CPU": 128, "DISK": 0, "DP": {"0": 160}}
        names = seq_hashes(np.array(TOKENS, dtype=np.uint32), 16)
        publisher.publish(stored([HASHES[0]], BLOCKS[0]))
        asked = {"model": "m", "block_size": 16, "seq_hashes": names[:9]}
        until(
            lambda: served.post("/query_by_hash", **asked)["default"]["a"]["GPU"] == 144,
            "hashes do not find the blocks",
        )
        served.post("/unregister", instance_id="a", dp_rank=0)
        until(lambda: "index_blocks 0.0" in served.ask("GET", "/metrics").body.decode(), "its blocks are kept")


def test_lost_batches_are_replayed(served):
    with Publisher() as publisher:
        publisher.publish(stored(HASHES[:3], TOKENS[:48]))  # before anybody listens
        follow(served, publisher)
        assert gpu(served) == 48
        publisher.publish(removed([HASHES[2]]), lost=True)
        publisher.publish(stored([HASHES[4]], BLOCKS[0], b"unknown"))
        until(lambda: gpu(served) == 32, "what was lost is not replayed")
        assert metric(served, "gaps") == 1


def test_after_lost_batches_that_nobody_replays_nothing_of_before_is_claimed(served):
    with Publisher() as publisher:
        follow(served, publisher, replay=False)
        publisher.publish(stored(HASHES[:3], TOKENS[:48]))
        until(lambda: gpu(served) == 48, "the blocks are not known")
        publisher.publish(removed([HASHES[2]]), lost=True)
        publisher.publish(stored([HASHES[3]], BLOCKS[3], HASHES[2]))
        until(lambda: metric(served, "gaps") == 1, "the gap is not noticed")
        assert gpu(served) == 0
        publisher.publish(stored(HASHES[:3], TOKENS[:48]))
        until(lambda: gpu(served) == 64, "the later block is not found behind its parents")


def test_what_a_publisher_has_not_kept_is_not_claimed(served):
    with Publisher(kept=2) as publisher:
        publisher.publish(stored(HASHES[:1], BLOCKS[0]))
        publisher.publish(CLEARED)
        publisher.publish(stored(HASHES[1:2], BLOCKS[1]))
        follow(served, publisher)
        assert gpu(served, BLOCKS[1]) == 16 and gpu(served) == 0


def test_what_was_lost_and_is_not_kept_any_more_ends_what_was_known_before(served):
    with Publisher() as publisher:
        publisher.publish(stored(HASHES[:3], TOKENS[:48]))
        follow(served, publisher)
        publisher.publish(removed([HASHES[2]]), lost=True)
        publisher.keep_from_here()
        publisher.publish(stored([HASHES[7]], BLOCKS[7]), lost=True)
        publisher.publish(stored([HASHES[8]], BLOCKS[8]))
        until(lambda: gpu(served, BLOCKS[8]) == gpu(served, BLOCKS[7]) == 16, "what was kept is not replayed")
        assert gpu(served) == 0 and metric(served, "failed_replays") == 0


def test_where_the_pool_and_tiers_are_looked_into_an_engines_word_on_them_does_not_count(served):
    """SGLang's memory on the host is its own."""
    media = {"GPU": TOKENS[:16], "CPU": TOKENS[16:32], "DISK": TOKENS[32:48]}
    with Publisher() as publisher:
        follow(served, publisher)
        served.register("elsewhere", block_size=16, pool=False, **publisher.endpoints)
        served.register("sglang", block_size=16, type="SGLang", **publisher.endpoints)
        publisher.publish(*(stored([name.encode()], block, medium=name) for name, block in media.items()))
        publisher.publish(stored([HASHES[9]], BLOCKS[9]))  # behind them
        names = ("a", "elsewhere", "sglang")
        until(lambda: all(of(served, name, BLOCKS[9])["GPU"] for name in names), "the events are not taken in")
        told = {name: [of(served, name, block)[medium] for medium, block in media.items()] for name in names}
    assert told == {"a": [16, 0, 0], "elsewhere": [16, 16, 16], "sglang": [16, 16, 0]}


def test_with_its_engine_what_it_held_is_gone_and_the_next_one_is_followed(served):
    with Publisher() as publisher:
        follow(served, publisher, replay=False)
        publisher.publish(stored(HASHES[:3], TOKENS[:48]))
        until(lambda: gpu(served) == 48, "the blocks are not known")
        port = publisher.port
    until(lambda: gpu(served) == 0, "the blocks of a dead engine are claimed")
    with Publisher(port) as publisher:

        def heard() -> bool:
            publisher.publish(stored([HASHES[7]], BLOCKS[0]))
            return gpu(served) == 16

        until(heard, "the next engine is not followed")


def test_an_engine_that_began_anew_unnoticed_is_known_by_its_numbers():
    told = Told()
    told(stored(HASHES[:3], TOKENS[:48]))
    told(stored([HASHES[3]], BLOCKS[3], HASHES[2]))
    again, later = read_batch(packed()), read_batch(packed())
    later.time_s += 1
    again.time_s -= 3600
    assert told.stream.order(0, again) == "again"
    assert told.stream.order(0, later) == "restarted"
    assert told.stream.order(2, later) == "next"
    assert told.stream.order(3, later) == "gap"


def test_where_pyzmq_is_missing_an_instance_is_registered_and_told_so(pool, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zmq.asyncio", None)
    with serving(pool) as client:
        assert "mooncake-connector[index]" in client.register("a", endpoint="tcp://127.0.0.1:1")["remark"]
        assert client.query(TOKENS)["default"]["a"]["GPU"] == 0


def test_a_hash_that_names_another_block_leaves_nothing_of_the_first():
    told = Told()
    told(stored([HASHES[0]], BLOCKS[0]))
    told(stored([HASHES[0]], BLOCKS[1]))
    assert told.leading() == 0 and told.leading(BLOCKS[1]) == 1
    told(removed([HASHES[0]]))
    assert told.held.num_blocks == 0
