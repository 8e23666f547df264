"""The four hybrid models in real vLLM servers that share a pool: restarts, two ranks, and groups that lose pages.

The long form of test_models.py, which has one engine in its own process. What people are told of a group that lacks
pages is asked of one model in every run.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from long_form import LONG

from e2e.pages import wait_for
from e2e.process import assert_no_complaints, pool_folder, running
from e2e.questions import SMALLEST_GAP, Examiner, Question
from e2e.said import LOGS_REQUESTS, explained_in_words, line, why, why_in_words
from e2e.server import ONE_CORE, Server
from models import checkpoint
from mooncake_connector.kv.keys import page_keys, root_digest
from mooncake_connector.misses import Miss
from store_client import EmbeddedStore
from store_client.base import SpaceInfo

pytestmark = pytest.mark.long
long_form = pytest.mark.skipif(not LONG, reason="servers of four models (`make test-long`)")

PAGE_TOKENS, HIT, SALT = 64, 512, "hybrid"
ROUNDS = 30
ARGS = ("--max-model-len", "1024", "--no-disable-hybrid-kv-cache-manager")
MODELS: dict[str, tuple[tuple[str, ...], float]] = {
    "gemma3": ((), SMALLEST_GAP),
    "gpt-oss": ((), SMALLEST_GAP),
    "qwen3-next": (("--dtype", "bfloat16"), 0.1),
    "cohere2": ((), SMALLEST_GAP),
}
"""Arguments, and how far ahead the best token of each step has to be: GDN computes in nothing else on the CPU."""
HAS_STATES = {"qwen3-next"}
STAGES = ("--pipeline-parallel-size", "2", "--no-enforce-eager", "-cc.mode=1", "-cc.backend=eager")
"""Of which Cohere 2's first has windows alone. Told to run eagerly, vLLM's CPU backend fails at any pipeline."""
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@dataclass
class Family:
    """Servers of one model on one pool."""

    name: str
    pool: Path
    one: Server
    start: Callable[..., Server]
    question: Question

    def ask(self, server: Server) -> int:
        """Ask with an empty cache of the engine's own, check the text, and return how many tokens were loaded."""
        server.reset_prefix_cache()
        answer = server.ask(self.question.prompt, max_tokens=len(self.question.answer), cache_salt=SALT)
        assert answer.token_ids == self.question.answer
        return answer.cached_tokens

    def lose(self, info: SpaceInfo) -> None:
        """The pool loses what a group has of the question."""
        with EmbeddedStore(self.pool) as store:
            store.space(info.namespace, info.shard).remove(self.keys)

    @property
    def keys(self) -> list[bytes]:
        """Of the pages of the longest hit."""
        prompt = list(self.question.prompt)
        return page_keys(prompt, PAGE_TOKENS, root=root_digest(None, SALT))[: HIT // PAGE_TOKENS]

    def holding(self) -> list[SpaceInfo]:
        """The groups, by rank, that have the page at the end of the hit."""
        with EmbeddedStore(self.pool) as store:
            last = self.keys[-1:]
            return [one for one in store.namespaces() if any(store.space(one.namespace, one.shard).contains(last))]


@pytest.fixture(scope="module", params=MODELS if LONG else ["gemma3"])
def family(request: pytest.FixtureRequest, logs: Path) -> Iterator[Family]:
    args, gap = MODELS[request.param]
    servers: list[Server] = []
    with ExitStack() as stack:
        pool = stack.enter_context(pool_folder())

        def start(*more: str, **env: str) -> Server:
            log = logs / f"hybrid-{request.param}-{len(servers)}.log"
            every = [*ARGS, *args, *more]
            settings = ONE_CORE | LOGS_REQUESTS | env
            server = Server(checkpoint(request.param), log=log, pool=pool, args=every, env=settings)
            servers.append(server)
            return stack.enter_context(running(server))

        one = start()
        question = Examiner(one, max_tokens=4, smallest_gap=gap).question("hybrid", 600)
        yield Family(request.param, pool, one, start, question)
    assert_no_complaints(servers)


@long_form
def test_servers_of_one_pool_answer_alike_also_after_a_kill(family: Family) -> None:
    assert family.ask(family.one) == 0
    wait_for(lambda: family.ask(family.one) == HIT, "a hit from the pool")
    two = family.start()
    assert family.ask(two) == HIT
    two.stop()
    family.one.kill()
    family.one.restart()
    assert family.ask(family.one) == HIT


@long_form
def test_a_group_that_loses_its_pages_while_they_are_loaded_costs_no_text(family: Family) -> None:
    """One group after the other, at any moment of a load; what is lost is computed, stored and loaded again."""
    source, groups = random.Random(family.name), family.holding()
    assert len(groups) > 1
    for number in range(ROUNDS):
        wait_for(lambda: family.ask(family.one) == HIT, "a hit from the pool")
        thread = threading.Timer(source.random() ** 2 * 0.2, family.lose, (groups[number % len(groups)],))
        thread.start()
        family.ask(family.one)
        thread.join()
    wait_for(lambda: family.ask(family.one) == HIT, "a hit from the pool")


def test_a_window_or_a_state_that_is_gone_is_why_what_full_attention_has_is_computed(
    family: Family, tmp_path: Path
) -> None:
    wait_for(lambda: family.ask(family.one) == HIT, "a hit from the pool")
    (tmp_path / "tokens.json").write_text(json.dumps(family.question.prompt))
    asked = ("--url", family.one.url, "--salt", SALT, "--tokens", str(tmp_path / "tokens.json"))
    found = why(family.pool, *asked)
    assert (found["hit_tokens"] >= HIT, len(found["groups"])) == (True, len(family.holding()))

    family.lose(next(info for info in family.holding() if info.namespace.rests_on_others))
    found = why(family.pool, *asked)
    assert (found["reason"], found["hit_tokens"]) == ("groups_disagree", 0)
    assert f"why not more: {Miss.GROUPS_DISAGREE.words.said}\n" in why_in_words(family.pool, *asked)
    said = line(family.one, lambda: family.ask(family.one))
    assert (said["miss"], said["hit_tokens"]) == ("groups_disagree", "0")
    explained_in_words(family.one, family.pool, said)
    wait_for(lambda: family.ask(family.one) == HIT, "a hit from the pool")


@long_form
@pytest.mark.parametrize(
    ("more", "env"),
    [(("--tensor-parallel-size", "2"), {}), (STAGES, COMPILED), ((), {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"})],
    ids=["two ranks", "two stages", "convolutions in the other order"],
)
def test_others_read_what_one_stored_but_for_states_of_another_form(
    family: Family, more: tuple[str, ...], env: dict[str, str]
) -> None:
    """The order is what NIXL asks for (vllm#54387); the pool keeps states of both, and of both splits, apart."""
    if more == STAGES and family.name in HAS_STATES:
        pytest.skip("vLLM's CPU backend wants the same layouts of all stages, and the first would have states alone")
    other = family.start(*more, **env)
    assert family.ask(other) == (0 if family.name in HAS_STATES else HIT)
    wait_for(lambda: family.ask(other) == HIT, "a hit from the pool")
    assert family.ask(family.one) == HIT
    other.stop()


@long_form
@pytest.mark.parametrize(
    ("args", "hit"),
    [
        (("--disable-hybrid-kv-cache-manager",), 576),
        ((*ARGS[2:], "--speculative-config", json.dumps(NGRAMS)), HIT),
    ],
    ids=["one group", "n-grams"],
)
def test_windows_in_one_group_and_with_proposals_of_ngrams(args: tuple[str, ...], hit: int, logs: Path) -> None:
    """In one group every token is kept, so that a hit ends with any page."""
    with pool_folder() as pool:
        log = logs / f"hybrid-gemma3-{hit}.log"
        server = Server(checkpoint("gemma3"), log=log, pool=pool, args=[*ARGS[:2], *args], env=ONE_CORE)
        with running(server):
            question = Examiner(server, max_tokens=8).question("hybrid", 600)

            def loaded() -> int:
                server.reset_prefix_cache()
                answer = server.ask(question.prompt, max_tokens=8, cache_salt=SALT)
                assert answer.token_ids == question.answer
                return answer.cached_tokens

            assert loaded() == 0
            wait_for(lambda: loaded() == hit, "a hit from the pool")
    assert_no_complaints([server])
