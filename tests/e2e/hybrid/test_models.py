"""The four hybrid models of tests/models in the real vLLM: a hit from the pool answers as the engine alone does.

The engine runs inside this process, one model after the other. Its text says something where it is clear and depends
on the whole prompt (`e2e.questions`).
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long_form import LONG

import store_client.agent.client as client_module
import store_client.agent.clients as clients
import store_client.agent.gift as gift_module
import store_client.agent.sought as sought_module
from e2e.client import Answer
from e2e.inside import drain, vllm_inside
from e2e.pages import clear, wait_for
from e2e.questions import SMALLEST_GAP, Examiner, Question, draw_tokens
from models import checkpoint
from mooncake_connector.kv.keys import page_keys
from store_client import EmbeddedStore
from store_client.agent.visit import ask_report
from store_client.base import SpaceInfo
from store_client.testing import get_pages, put_pages

pytestmark = pytest.mark.engine

PAGE_TOKENS = 64
HIT = 512
"""Of 600 tokens: where the blocks of all groups end, 128 or 256 tokens long."""
SOUGHT_S = 0.5
FORKS = [65, 129, 255, 256, 257, 600]
"""Tokens in common with a prompt of 600: around the ends of pages and of blocks, of 128 tokens or 256."""
if LONG:
    FORKS = sorted({*FORKS, *(end + aside for end in range(PAGE_TOKENS, 600, PAGE_TOKENS) for aside in (-1, 0, 1))})
ROUNDING = {
    "gemma3": (SMALLEST_GAP, 0.001),
    "gpt-oss": (SMALLEST_GAP, 0.001),
    "qwen3-next": (0.1, 0.1),
    "cohere2": (SMALLEST_GAP, 0.001),
}
"""How far ahead the best token of each step has to be, and how far rounding moves it at most."""
GROUPS = {"gemma3": 3, "gpt-oss": 2, "qwen3-next": 4, "cohere2": 4}


@dataclass
class Inside:
    """An engine in this process and its pool."""

    llm: Any
    pool: Path
    folder: Path
    """Behind the pool."""
    giving: list[object]
    """What the agent is writing to it."""

    def ask(self, prompt: Sequence[int], *, max_tokens: int = 4, cache_salt: str | None = None) -> Answer:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, detokenize=False)
        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if cache_salt is not None:
            tokens["cache_salt"] = cache_salt
        output = self.llm.generate(tokens, greedy, use_tqdm=False)[0]
        drain(self.llm)
        (answer,) = output.outputs
        steps = tuple({token: one.logprob for token, one in step.items()} for step in answer.logprobs)
        return Answer(tuple(answer.token_ids), "", steps, len(prompt), output.num_cached_tokens or 0, 0.0, 0.0)

    @property
    def block_tokens(self) -> int:
        """Where hits end: of a model with states vLLM makes it as large as the processor's kernels ask for."""
        return int(self.llm.llm_engine.vllm_config.cache_config.block_size)

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    def stored(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of the prompt's pages in the pool, each as often as it is there, once all of them are in the folder."""
        keys = page_keys(list(prompt), PAGE_TOKENS)
        with EmbeddedStore(self.pool) as store:
            held = [key for key in keys for _ in groups_of(store, key)]
        counts = Counter(held)  # by key: the folder has older pages too, of others of them
        wait_for(lambda: all(len(self.files(key)) >= counts[key] for key in counts), "pages in the folder")
        # What the pool loses before the agent has looked whether it was still there is taken out of the folder again.
        wait_for(lambda: not self.giving, "the end of all writes")
        return held

    def files(self, *keys: bytes) -> list[Path]:
        """What the folder has of these pages, in all groups."""
        names = {key.hex() for key in keys}
        return sorted(path for path in self.folder.rglob("*") if path.name in names)

    def empty_pool(self) -> None:
        """And the engine's own cache; the folder has what it had, and what was fetched before may be fetched again."""
        clear(self.pool)
        self.forget()
        wait_for(lambda: not any(client._kept for client in clients._clients.values()), "the end of all asks")
        time.sleep(SOUGHT_S)  # and what the folder did not have before it was written is sought again

    def count(self, what: str) -> int:
        """Of the folder, as the agent says."""
        report = ask_report(self.pool)
        assert report is not None
        (tier,) = report["tiers"]
        return int(tier[what])

    def falsify(self, prompt: Sequence[int], *, part: int) -> None:
        """Give what the hit goes on from in one group other bytes, with a checksum that matches them."""
        keys = page_keys(list(prompt), PAGE_TOKENS)[: HIT // PAGE_TOKENS]
        with EmbeddedStore(self.pool) as store:
            info = groups_of(store, keys[-1])[part]
            space, nbytes = store.space(info.namespace, info.shard), page_nbytes(info)
            held = [key for key, found in zip(keys, space.contains(keys), strict=True) if found]
            assert held[-1] == keys[-1]
            right = [np.empty(nbytes, np.uint8) for _ in held]
            assert all(get_pages(space, held, right, nbytes=nbytes))
            for page in right:
                page[1::2] ^= 0x80  # the other sign for every number, of two bytes or four
            assert space.remove(held) == len(held)
            put_pages(space, held, right, parents=[None] * len(held), deadline_s=60.0)


def groups_of(store: EmbeddedStore, key: bytes) -> list[SpaceInfo]:
    """What the pool has under a key, in each group."""
    infos = [info for info in store.namespaces() if any(store.space(info.namespace, info.shard).contains([key]))]
    return sorted(infos, key=lambda info: info.namespace.group)


def page_nbytes(info: SpaceInfo) -> int:
    """Bytes of one object, by what its namespace says of the group."""
    group, itemsizes = json.loads(info.namespace.group), {"bfloat16": 2, "float32": 4}
    if group["kind"] == "state":
        parts = zip(group["shapes"], group["dtypes"], strict=True)
        return sum(math.prod(shape) * itemsizes[dtype] for shape, dtype in parts) * len(group["layers"])
    content = (group["k_dim"] + group["v_dim"]) * group["itemsize"]
    return PAGE_TOKENS * group["num_kv_heads"] * content * len(group["layers"])


@pytest.fixture(scope="module", params=GROUPS)
def inside(request: pytest.FixtureRequest) -> Iterator[Inside]:
    patch = pytest.MonkeyPatch()
    patch.setattr("store_client.agent.patience.LEAST_S", 60.0)  # however busy the machine is
    patch.setattr("store_client.agent.source.is_worth_it", lambda *args: True)
    patch.setattr(client_module, "_KEPT_S", 0.0)
    patch.setattr(client_module, "_SILENT_S", 60.0)
    patch.setattr(sought_module, "_GOOD_S", SOUGHT_S)
    giving, give = list[object](), gift_module.Gift.give

    def watched(gift: gift_module.Gift, *args: Any) -> bool:
        giving.append(gift)
        try:
            return give(gift, *args)
        finally:
            giving.remove(gift)

    patch.setattr(gift_module.Gift, "give", watched)
    base = Path(tempfile.mkdtemp(prefix="mooncake-connector-test-", dir="/dev/shm"))
    pool, folder, secret = base / "pool", base / "folder", base / "secret"
    folder.mkdir(mode=0o700)
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    settings = {
        "pool": str(pool),
        "capacity": "256MiB",
        "page_tokens": PAGE_TOKENS,
        "tiers": [{"kind": "folder", "path": str(folder), "timeout_s": 60.0}],
        "agent": "embedded",
        "secret_file": str(secret),
        "lookup_wait_s": 60.0,
        "load_deadline_s": 60.0,
    }
    dtype = "bfloat16" if request.param == "qwen3-next" else "float32"  # its kernels on the CPU know nothing else
    with vllm_inside(checkpoint(request.param), dtype, settings, disable_hybrid_kv_cache_manager=False) as llm:
        yield Inside(llm, pool, folder, giving)
    patch.undo()
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def question(inside: Inside) -> Question:
    return Examiner(inside, max_tokens=4).question("hybrid", 600)


def test_computed_own_hit_and_hit_from_the_pool_are_one_text(
    inside: Inside, question: Question, request: pytest.FixtureRequest
) -> None:
    computed = inside.ask(question.prompt)
    own = inside.ask(question.prompt)
    inside.forget()
    loaded = inside.ask(question.prompt)
    assert [answer.cached_tokens for answer in (computed, own, loaded)] == [0, HIT, HIT]
    assert {answer.token_ids for answer in (computed, own, loaded)} == {question.answer}
    with EmbeddedStore(inside.pool) as store:
        key = page_keys(list(question.prompt), PAGE_TOKENS)[HIT // PAGE_TOKENS - 1]
        assert len(groups_of(store, key)) == GROUPS[request.node.callspec.params["inside"]]


def test_what_the_pool_has_lost_comes_from_the_folder_behind_it(inside: Inside, question: Question) -> None:
    inside.ask(question.prompt)
    held = inside.stored(question.prompt)
    inside.empty_pool()
    fetched = inside.count("fetched_pages")
    answer = inside.ask(question.prompt)
    assert (answer.cached_tokens, answer.token_ids) == (HIT, question.answer)
    assert 0 < inside.count("fetched_pages") - fetched <= len(held)
    assert len(inside.stored(question.prompt)) >= HIT // PAGE_TOKENS


def test_a_changed_file_of_any_group_is_refused_and_the_prompt_is_computed(inside: Inside, question: Question) -> None:
    """The control: each group's page at the end of the hit is fetched, and looked at."""
    inside.ask(question.prompt)
    last = page_keys(list(question.prompt), PAGE_TOKENS)[HIT // PAGE_TOKENS - 1]
    count = inside.stored(question.prompt).count(last)
    for group in range(count):
        assert inside.stored(question.prompt).count(last) == count
        inside.empty_pool()
        file, corrupt = inside.files(last)[group], inside.count("corrupt_pages")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        answer = inside.ask(question.prompt)
        assert (answer.cached_tokens, answer.token_ids) == (0, question.answer), f"group {group} of {count}"
        assert inside.count("corrupt_pages") == corrupt + 1


@pytest.mark.long
def test_a_prompt_that_leaves_another_one_at_any_token_has_the_hit_it_must_have(
    inside: Inside, request: pytest.FixtureRequest
) -> None:
    """Where all groups have the last block boundary before a fork, a hit ends there, else at the last one that they
    have; and the prompt leaves there what the next one needs. So each hit follows from those before it.
    """
    gap, rounding = ROUNDING[request.node.callspec.params["inside"]]
    unit = inside.block_tokens
    source = random.Random(0)
    known = draw_tokens(source, 600)
    inside.ask(known)
    ends = {0, HIT}
    for fork in FORKS:
        prompt, computed = clear_fork(inside, known[:fork], source, unit + 9, gap)
        inside.forget()
        answer = inside.ask(prompt)
        boundary = fork // unit * unit
        assert answer.cached_tokens == max(end for end in ends if end <= boundary), f"of {fork} tokens in common"
        assert answer.token_ids == computed.token_ids
        assert moved(answer, computed) < rounding, f"after {answer.cached_tokens} of {fork} tokens in common"
        ends.add(boundary)


def clear_fork(
    inside: Inside, shared: tuple[int, ...], source: random.Random, more: int, gap: float
) -> tuple[tuple[int, ...], Answer]:
    """A prompt that begins with these, and its answer, which has a clear margin, computed as a whole."""
    for _ in range(50):
        prompt = (*shared, *draw_tokens(source, more))
        answer = inside.ask(prompt, cache_salt=bytes(prompt[-16:]).hex())
        assert answer.cached_tokens == 0
        if answer.smallest_gap >= gap:
            return prompt, answer
    raise AssertionError("none of 50 forks has an answer with a clear margin")


def moved(one: Answer, other: Answer) -> float:
    """How far the log-probabilities of what both had among their likeliest tokens lie apart at most."""
    steps = zip(one.steps, other.steps, strict=True)
    return max(abs(first[token] - second[token]) for first, second in steps for token in first.keys() & second.keys())


def test_other_bytes_in_any_group_are_what_the_model_goes_on_from(inside: Inside, question: Question) -> None:
    """The negative control: rounding moves log-probabilities by a thousandth of what is asked for here."""
    with EmbeddedStore(inside.pool) as store:
        key = page_keys(list(question.prompt), PAGE_TOKENS)[HIT // PAGE_TOKENS - 1]
        count = len(groups_of(store, key))
    for part in range(count):
        inside.forget()
        before = inside.ask(question.prompt)
        inside.falsify(question.prompt, part=part)
        inside.forget()
        after = inside.ask(question.prompt)
        assert before.cached_tokens == after.cached_tokens == HIT
        first, other = before.steps[0], after.steps[0]
        moved = [abs(first[token] - other.get(token, -100.0)) for token in first]
        assert max(moved) > 0.01, f"group {part} of {count}"


def test_a_prompt_shorter_than_a_block_is_computed(inside: Inside) -> None:
    for _ in range(2):
        assert inside.ask(range(100)).cached_tokens == 0
        inside.forget()
