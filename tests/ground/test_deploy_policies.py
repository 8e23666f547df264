"""How the built-in router scores instances and chooses one; the index, the history and the proxy are not here."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_connector.deploy.index import matched
from mooncake_connector.deploy.instances import FAILURES, Group, Instance, Work
from mooncake_connector.deploy.policies import FEW_REQUESTS, Conductor, LeastLoaded, Prompt, RoundRobin, Weights

WEIGHTS = st.builds(Weights, *[st.floats(0, 100) for _ in range(3)])
LOADS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**9)), min_size=1, max_size=12)
POLICIES = (RoundRobin, LeastLoaded, lambda: Conductor(Weights()))


def instances(loads: list[tuple[int, int]]) -> list[Instance]:
    return [
        Instance(f"http://{at}", load=load, failures=0, prefill_tokens=tokens)
        for at, (load, tokens) in enumerate(loads)
    ]


@given(LOADS, WEIGHTS, st.integers(0, 10**6), st.data())
def test_a_cache_counts_by_its_ratio_whatever_an_index_says(loads, weights, tokens, data):
    cached = {f"http://{at}": data.draw(st.integers(-5, 10**12)) for at in range(len(loads))}
    policy, some = Conductor(weights), instances(loads)
    gained = [
        told - none
        for told, none in zip(*(policy.scores(some, Prompt(tokens, of)) for of in (cached, {})), strict=True)
    ]
    assert all(-1e-6 <= gain <= weights.cache * (1 + 1e-9) + 1e-6 for gain in gained)


@given(LOADS, WEIGHTS, st.integers(0, 10**6))
def test_loads_only_take_away_and_nothing_from_who_has_the_least(loads, weights, tokens):
    scores = Conductor(weights).scores(instances(loads), Prompt(tokens))
    assert all(score <= 0 for score in scores)
    least = [
        load == min(requests for requests, _ in loads) and work == min(work for _, work in loads)
        for load, work in loads
    ]
    assert all(score == 0 for score, has_least in zip(scores, least, strict=True) if has_least)


@given(LOADS, WEIGHTS, st.integers(1, 10**6), st.integers(2, 1000))
def test_only_proportions_count_once_there_is_a_load(loads, weights, tokens, times):
    """A hundred times as many requests, and tokens, of everybody are the same choice."""
    busy = [(load + FEW_REQUESTS, work + tokens) for load, work in loads]
    larger = [(load * times, work * times) for load, work in busy]
    prompt = Prompt(tokens, {"http://0": tokens // 2})
    scores = [Conductor(weights).scores(instances(one), prompt) for one in (busy, larger)]
    assert scores[0] == pytest.approx(scores[1])


@given(LOADS, st.integers(1, 10**6), st.data())
def test_more_in_the_cache_or_less_to_do_never_lowers_a_score(loads, tokens, data):
    at = data.draw(st.integers(0, len(loads) - 1))
    url, policy = f"http://{at}", Conductor(Weights())
    before = policy.scores(instances(loads), Prompt(tokens, {url: tokens // 3}))
    cached = policy.scores(instances(loads), Prompt(tokens, {url: tokens // 2}))
    assert cached[at] >= before[at] and cached[:at] + cached[at + 1 :] == before[:at] + before[at + 1 :]
    idle = [(0, 0) if place == at else load for place, load in enumerate(loads)]
    scores = policy.scores(instances(idle), Prompt(tokens, {url: tokens // 3}))
    assert scores[at] == pytest.approx(Weights().cache * (tokens // 3) / tokens) and scores[at] >= before[at] - 1e-9


@given(LOADS, st.integers(0, 10**6))
def test_an_index_that_says_the_same_of_all_changes_nothing(loads, tokens):
    policy, all_of = Conductor(Weights()), instances(loads)
    liar = Prompt(tokens, {one.url: 10**15 for one in all_of})
    assert policy.choose(all_of, liar) == policy.choose(all_of, Prompt(tokens))


def test_without_a_prompt_the_least_loaded_is_chosen():
    some = instances([(3, 0), (1, 10**9), (2, 0)])
    assert Conductor(Weights()).choose(some, None) == LeastLoaded().choose(some, None) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_of_equal_ones_each_has_its_turn(policy):
    group = Group(instances([(0, 0)] * 3), policy())
    chosen = Counter(group.choose((), Prompt(1000)).url for _ in range(9))
    assert set(chosen.values()) == {3} and len(chosen) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_where_nobody_is_left_nobody_is_chosen(policy):
    assert Group([], policy()).choose((), Prompt(5)) is None
    only = Instance("http://0", failures=FAILURES)
    group = Group([only], policy())
    assert group.choose((), Prompt(5)) is None
    only.failures = 0
    assert group.choose((), Prompt(5)) is only and group.choose((), None) is only
    assert group.choose([only], Prompt(5)) is None


@pytest.mark.parametrize("policy", POLICIES)
@given(st.data())
def test_instances_come_and_go(policy, data):
    """Whoever is well and was not tried may be chosen, and nobody else, whatever their loads and caches."""
    group = Group(instances([(0, 0)] * 4), policy())
    for _ in range(data.draw(st.integers(1, 12))):
        for one in group.instances:
            one.failures = data.draw(st.sampled_from([0, FAILURES]))
            one.load, one.prefill_tokens = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 10**6))
        tried = data.draw(st.lists(st.sampled_from(group.instances), max_size=4))
        prompt = data.draw(
            st.none() | st.builds(Prompt, st.integers(0, 10**5), st.just({"http://1": 10**4, "http://9": 7}))
        )
        allowed = [one for one in group.instances if one.healthy and one not in tried]
        assert group.choose(tried, prompt) in (allowed or [None])


@pytest.mark.parametrize("count", [2, 3, 10])
@pytest.mark.parametrize("weights", [Weights(), Weights(100, 1, 0)], ids=("default", "cache above all"))
def test_one_prefix_that_floods_in_does_not_stay_on_one_instance(count, weights):
    """It alone has the prefix, all of it, and nothing has to be computed: the requests it has under way bound it."""
    group = Group(instances([(0, 0)] * count), Conductor(weights))
    prompt, more = Prompt(20_000, {"http://0": 20_000}), round(weights.cache / weights.requests)
    for _ in range(10_000):
        work = Work(group.choose((), prompt), prompt)
        work.prefilled()  # and never ends
        loads = [one.load for one in group.instances]
        assert loads[0] - min(loads) <= more * max(FEW_REQUESTS, min(loads)) + 1
    assert min(loads) > 10_000 / (count + more) / 2  # and nobody starves


def test_a_long_prompt_is_worth_a_wait_and_a_short_one_is_not():
    some = instances([(0, 8_000), (0, 0), (0, 0)])
    policy = Conductor(Weights())
    assert policy.choose(some, Prompt(20_000, {"http://0": 20_000})) == 0
    assert policy.choose(some, Prompt(2_000, {"http://0": 2_000})) in (1, 2)


def test_among_several_of_the_best_one_is_drawn():
    some = instances([(5, 0), (0, 0), (0, 0), (50, 0)])
    policy = Conductor(Weights(), 2, random.Random(7))
    assert {policy.choose(some, Prompt(10)) for _ in range(60)} == {1, 2}
    assert {Conductor(Weights(), 64, random.Random(7)).choose(some[:1], None) for _ in range(5)} == {0}


def test_a_request_counts_until_it_ends_and_its_prompt_until_it_is_computed():
    one, prompt = Instance("http://0"), Prompt(1000, {"http://0": 300})
    with Work(one, prompt) as work:
        assert (one.load, one.prefill_tokens) == (1, 700)
        work.prefilled()
        work.prefilled()
        assert (one.load, one.prefill_tokens) == (1, 0)
    work.end()
    assert (one.load, one.prefill_tokens) == (0, 0)
    with pytest.raises(ZeroDivisionError), Work(one, Prompt(10)):
        _ = 1 // 0
    assert (one.load, one.prefill_tokens) == (0, 0)


def test_a_number_of_tokens_beyond_all_measure_is_the_whole_prompt():
    told = matched({"default": {"http://a:1": {"longest_matched": 10**400}}}, ["http://a:1"])
    assert Prompt(100, told).ratio("http://a:1") == 1.0
