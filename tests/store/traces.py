"""Traces of several shapes, made from a seed: (seconds, blocks of the prompt) in the order of time."""

import random
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
