"""What must be true of a simulated world in the end, whatever happened in it."""

from __future__ import annotations

from collections import defaultdict

from simulated.network import TOKENS, Rank, World

from transfer.protocol.orders import Ending


def endings(world: World, transfer: str) -> dict[str, Ending]:
    """What the ranks' present lives made of a transfer."""
    return {
        name: rank.released[transfer][0]
        for name, rank in world.ranks.items()
        if transfer in rank.released and world.lives(rank)
    }


def check(world: World, first_token: int = 0, most_messages: int = 3000) -> None:
    """Nothing hangs, nothing is held or remembered for ever, and what is called done is."""
    done = defaultdict(set)
    for rank in world.history:
        for transfer, (ending, _, at_s) in rank.released.items():
            _check_time(world, rank, transfer, at_s)
            if ending is Ending.DONE:
                done[transfer].add(rank.name)
                if rank.name[0] == "D":
                    _check_content(world, rank, transfer, first_token)
    for rank in world.history:
        for transfer, (ending, _, _) in rank.released.items():
            if ending is Ending.DONE and rank.name[0] == "P":
                served = {f"D{d}" for d, part in enumerate(world.parts) if int(rank.name[1:]) in part}
                # One that said so may have died before it told its engine.
                needed = any if world.apart else all
                assert needed(name in done[transfer] or name in world.died for name in served), (
                    rank.name,
                    transfer,
                    done,
                )
    for rank in filter(world.lives, world.ranks.values()):
        assert rank.side.held == []
        assert rank.released.keys() == rank.opened.keys()
        assert rank.side.tick(world.now_s) is None, f"{rank.name} remembers something for ever"
        assert rank.granted == {}
    assert world.messages < most_messages, "the ranks talk for ever"


def _check_time(world: World, rank: Rank, transfer: str, at_s: float) -> None:
    """No block is held beyond the limits, plus what a write and a revocation take."""
    own_s = max([world.faults.revoke_s, *world.faults.write_s.values()]) + 2 * world.timing.retry_s
    if rank.name[0] == "D":  # waiting for blocks, then for prefill, then for bytes
        limit_s = 2 * world.timing.hold_s + 2 * world.timing.deadline_s + own_s
        assert rank.failed.get(transfer, at_s) <= rank.opened[transfer] + limit_s
    elif transfer in rank.finished:
        assert at_s <= rank.finished[transfer] + world.timing.hold_s + own_s


def _check_content(world: World, rank: Rank, transfer: str, first_token: int) -> None:
    places = [
        (layer, token)
        for layers in world.parts[int(rank.name[1:])].values()
        for layer in layers
        for token in range(first_token, TOKENS)
    ]
    have = {at[1:] for at, value in rank.memory.items() if at[0] == transfer and value == transfer}
    assert set(places) <= have, f"{rank.name} calls {transfer} done without all of it"
