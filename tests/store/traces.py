"""Traces of several shapes, made from a seed: (seconds, blocks of the prompt) in the order of time."""

import random
from collections.abc import Iterator
from itertools import count

Request = tuple[float, list[int]]


def chat(seed: int, conversations: int, *, shared: int = 4) -> list[Request]:
    """People who talk in turns, after pauses of half a minute or so; most leave after a turn or two."""
    rng, new = random.Random(seed), count(1000)
    found, start = [], 0.0
    for _ in range(conversations):
        start += rng.expovariate(1.0)
        at, blocks = start, list(range(shared))
        patient = rng.random() < 0.3
        while True:
            blocks = blocks + [next(new) for _ in range(1 + int(rng.expovariate(1 / 5)))]
            found.append((at, blocks))
            if rng.random() < (0.15 if patient else 0.6):
                break
            at += rng.lognormvariate(3.5, 0.8)
    return sorted(found, key=lambda request: request[0])


def agents(seed: int, tasks: int, *, kinds: int = 12, shared: int = 30) -> list[Request]:
    """Agents with long system prompts of a few kinds: many calls in a row, seconds apart, and then no more."""
    rng, new = random.Random(seed), count(100_000)
    found, start = [], 0.0
    for _ in range(tasks):
        start += rng.expovariate(0.5)
        kind = min(int(rng.paretovariate(1.0)) - 1, kinds - 1)
        at, blocks = start, [1000 * kind + i for i in range(shared)]
        for _ in range(1 + int(rng.expovariate(1 / 12))):
            blocks = blocks + [next(new) for _ in range(1 + int(rng.expovariate(1 / 3)))]
            found.append((at, blocks))
            at += 1.0 + rng.expovariate(1 / 6)
    return sorted(found, key=lambda request: request[0])


def documents(seed: int, questions: int, *, shared: int = 2) -> list[Request]:
    """Questions about documents, a few of which are popular; now and then somebody goes through hundreds once."""
    rng, new = random.Random(seed), count(10_000_000)
    found: list[Request] = []
    at = 0.0
    while len(found) < questions:
        at += rng.expovariate(2.0)
        if rng.random() < 0.002:
            for _ in range(300):
                at += 0.05
                found.append((at, [*range(shared), *(next(new) for _ in range(20))]))
            continue
        document = int(rng.paretovariate(0.7))
        length = 5 + document * 7919 % 30
        blocks = [100 + 1000 * document + i for i in range(length)] if document < 10_000 else [next(new)] * 1
        found.append((at, [*range(shared), *blocks, next(new)]))
    return found


def rounds(seed: int, prompts: int, times: int) -> list[Request]:
    """A job that asks the same prompts over and over, in the same order: the worst there is for recency."""
    rng = random.Random(seed)
    lengths = [3 + int(rng.expovariate(1 / 10)) for _ in range(prompts)]
    return [
        (0.2 * (turn * prompts + i), [1000 * i + j for j in range(lengths[i])])
        for turn in range(times)
        for i in range(prompts)
    ]


def in_turn(first: list[Request], second: list[Request]) -> list[Request]:
    """One kind of traffic, and then another."""
    end, apart = first[-1][0], 1 << 40
    return first + [(end + at, [block + apart for block in blocks]) for at, blocks in second]


def shapes(scale: float = 1.0) -> Iterator[tuple[str, list[Request]]]:
    size = int(4000 * scale)
    yield "chat", chat(1, size)
    yield "agents", agents(2, size // 5)
    yield "documents", documents(3, 3 * size)
    yield "rounds", rounds(4, size // 4, 12)
    yield "chat, then documents", in_turn(chat(5, size), documents(6, 2 * size))
