"""Made traffic, for eviction policies: prompts as pages, from a seed. Eight kinds to look at, and three kept back."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from functools import cache
from hashlib import blake2b

from store_client.simulation.traces import MOONCAKE_BLOCK_TOKENS, Request, Trace

Prompts = list[tuple[float, list[int]]]
"""Seconds, and the names of a prompt's pages."""
Random = random.Random


def documents(rng: Random) -> Prompts:
    """Questions about 2,000 documents, some far more popular than others (Zipf, 0.9), two a second."""
    weights = [1 / (rank + 1) ** 0.9 for rank in range(2000)]
    sizes = [rng.randint(4, 40) for _ in weights]
    found, at = [], 0.0
    for number in range(6000):
        at += rng.expovariate(2)
        (document,) = rng.choices(range(len(weights)), weights)
        found.append((at, _pages(f"d{document}", sizes[document]) + _pages(f"q{number}", rng.randint(0, 3))))
    return found


def rounds(_: Random) -> Prompts:
    """A job that asks about 200 documents in the same order, fifteen times."""
    order = [(turn, document) for turn in range(15) for document in range(200)]
    return [
        (0.5 + 0.5 * at, _pages(f"d{document}", 20) + _pages(f"q{turn}.{document}", 1))
        for at, (turn, document) in enumerate(order)
    ]


def scans(rng: Random) -> Prompts:
    """Sixty prompts that come again and again, among long ones that come once."""
    found, at = [], 0.0
    for number in range(5000):
        at += rng.expovariate(2)
        if rng.random() < 0.4:
            found.append((at, _pages(f"h{rng.randrange(60)}", 20) + _pages(f"q{number}", 1)))
        else:
            found.append((at, _pages(f"u{number}", rng.randint(10, 40))))
    return found


def chats(rng: Random) -> Prompts:
    """People who talk in some eight turns, with pauses of a minute, under three system prompts, in an hour."""
    found = []
    for number in range(1200):
        at, length, system = rng.uniform(0, 3600), rng.randint(2, 12), _pages(f"s{rng.randrange(3)}", 4)
        for _turn in range(1 + min(int(rng.expovariate(1 / 8)), 30)):
            found.append((at, system + _pages(f"c{number}", length)))
            length += rng.randint(1, 5)
            at += rng.expovariate(1 / 60)
    return found


def agents(rng: Random) -> Prompts:
    """Agents of five kinds: up to thirty calls in a row, some seconds apart, and then no more."""
    found = []
    for number in range(400):
        at, length, tools = rng.uniform(0, 3600), rng.randint(4, 20), _pages(f"tools{number % 5}", 12)
        for _call in range(rng.randint(5, 30)):
            found.append((at, tools + _pages(f"a{number}", length)))
            length += rng.randint(1, 3)
            at += rng.uniform(2, 12)
    return found


def fashions(rng: Random) -> Prompts:
    """What is popular is something else every seven minutes."""
    found, at = [], 0.0
    for fashion, number in ((fashion, number) for fashion in range(8) for number in range(800)):
        at += rng.expovariate(2)
        document = min(int(rng.expovariate(1 / 25)), 119)
        pages = _pages(f"p{fashion}.d{document}", 10 + document % 20)
        found.append((at, pages + _pages(f"q{fashion}.{number}", rng.randint(0, 4))))
    return found


def returns(rng: Random) -> Prompts:
    """Three prompts in five come back once, after five minutes."""
    found = []
    for number in range(1500):
        at, pages = rng.uniform(0, 7200), _pages(f"c{number}", rng.randint(5, 30))
        found.append((at, pages))
        if rng.random() < 0.6:
            found.append((at + rng.gauss(300, 15), pages + _pages(f"c{number}+", 3)))
    return found


def days(rng: Random) -> Prompts:
    """Four days: chats by day, and by night a batch that asks three questions about each of 150 documents."""
    found = []
    for day in range(4):
        for number in range(300):
            at, length = 86400 * day + rng.uniform(0, 8 * 3600), rng.randint(2, 12)
            for _turn in range(1 + min(int(rng.expovariate(1 / 5)), 20)):
                found.append((at, _pages("sys", 4) + _pages(f"c{day}.{number}", length)))
                length += rng.randint(1, 4)
                at += rng.expovariate(1 / 90)
        for asked in range(450):
            at, document, question = 86400 * day + 16 * 3600 + 20.0 * (asked + 1), asked // 3, asked % 3
            found.append((at, _pages(f"b{day}.{document}", 25) + _pages(f"bq{day}.{document}.{question}", 1)))
    return found


def retrieved(rng: Random) -> Prompts:
    """Kept back. Questions with three to six of 300 documents put before them, best match first: a document is found
    again only where the same ones came before it. What is asked about drifts; three in ten ask once more."""
    sizes, found, at = [rng.randint(1, 8) for _ in range(300)], [], 0.0
    for number in range(5000):
        at += rng.expovariate(1.5)
        topic = int(rng.paretovariate(0.8)) + number // 500 * 20
        context = "r"
        pages = _pages(context, 3)
        for _ in range(rng.randint(3, 6)):
            document = (topic + int(rng.expovariate(1 / 1.5))) % 300
            context += f"/{document}"
            pages = pages + _pages(context, sizes[document])
        found.append((at, pages + _pages(f"{context}?{number}", 1)))
        if rng.random() < 0.3:
            found.append((at + rng.lognormvariate(3.5, 1), pages + _pages(f"{context}?{number}", 3)))
    return found


def workdays(rng: Random) -> Prompts:
    """Kept back. Three days of coding agents: people of six teams, each with a repository's context of the day, write
    now and then from nine to six, with a break at noon; each message is a loop of quick calls of tools."""
    found = []
    for day in range(3):
        for person in range(14):
            context = _pages(f"t{person % 6}.{day // (1 + person % 2)}", 10 + person % 6)
            at, talk, length = 86400 * day + rng.gauss(9 * 3600, 1800), 0, rng.randint(2, 6)
            while at < 86400 * day + rng.gauss(18 * 3600, 1800):
                for _call in range(1 + min(int(rng.expovariate(1 / 5)), 25)):
                    found.append((at, context + _pages(f"w{day}.{person}.{talk}", length)))
                    length += rng.choice((1, 1, 1, 2, 8))
                    at += rng.uniform(1, 15)
                at += rng.lognormvariate(5.5, 1.3)
                if 12 * 3600 < at % 86400 < 13 * 3600 and rng.random() < 0.7:
                    at += 3600
                if length > 120 or rng.random() < 0.2:  # a new talk
                    talk, length = talk + 1, rng.randint(2, 6)
    return found


def tenants(rng: Random) -> Prompts:
    """Kept back. Forty customers of one server, some far busier than others, each with a system prompt and with hours
    of its own: questions that come once, short chats, and long texts without a system prompt that come once."""
    found = []
    for tenant in range(40):
        system, busy, begins = _pages(f"y{tenant}", rng.randint(1, 30)), 2400 / (tenant + 3), rng.uniform(0, 20_000)
        lasts = rng.uniform(4_000, 36_000)
        for number in range(int(busy)):
            at, kind, name = begins + rng.uniform(0, lasts), rng.random(), f"y{tenant}.{number}"
            if kind < 0.55:
                found.append((at, system + _pages(name, rng.randint(1, 6))))
            elif kind < 0.85:
                length = rng.randint(1, 6)
                for _turn in range(rng.randint(2, 6)):
                    found.append((at, system + _pages(name, length)))
                    length += rng.randint(1, 3)
                    at += rng.lognormvariate(3.8, 0.8)
            else:
                found.append((at, _pages(name, rng.randint(15, 60))))
    return found


KINDS: tuple[Callable[[Random], Prompts], ...] = (documents, scans, chats, agents, fashions, returns, days, rounds)
KEPT_BACK: tuple[Callable[[Random], Prompts], ...] = (retrieved, workdays, tenants)
"""No policy is chosen by these: they say how well one does on traffic that nobody looked at."""


def made(kind: Callable[[Random], Prompts], most: int | None = None) -> Trace:
    """Traffic of this kind, always the same; `most` of its first prompts."""
    prompts = sorted(kind(random.Random(1 + (KINDS + KEPT_BACK).index(kind))), key=lambda prompt: prompt[0])[:most]
    requests = tuple(
        Request(int(at * 1e9) + number, MOONCAKE_BLOCK_TOKENS * len(pages), array("Q", pages))
        for number, (at, pages) in enumerate(prompts)
    )
    return Trace(MOONCAKE_BLOCK_TOKENS, requests, len({page for request in requests for page in request.pages}))


def _pages(of: str, count: int) -> list[int]:
    return [_name(f"{of}/{number}") for number in range(count)]


@cache
def _name(of: str) -> int:
    return int.from_bytes(blake2b(of.encode(), digest_size=8).digest(), "little")
