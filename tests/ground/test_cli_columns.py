"""Tables for terminals of any width: nothing is cut, and what does not fit side by side is stacked."""

import pytest

from mooncake_connector.cli import tables
from mooncake_connector.cli.columns import pairs, sheet
from mooncake_connector.kv.geometry import Shard
from store_client import SpaceInfo, StoreStats
from store_client.embedded import PoolUser
from store_client.testing import namespace

HEADINGS = ("id", "model", "size>")
ROWS = [("3486f3d9", "org/[mooncake]-large", "896.0 KiB"), ("a6aaa646", "模型", "1.0 GiB")]


def test_columns_are_aligned_where_they_fit():
    assert sheet("Namespaces", HEADINGS, ROWS, width=80) == [
        "Namespaces",
        "id        model                      size",
        "3486f3d9  org/[mooncake]-large  896.0 KiB",
        "a6aaa646  模型                    1.0 GiB",
    ]


def test_a_pipe_has_no_width():
    assert sheet("", HEADINGS, [("x" * 500, "y", "z")], width=None)[1].startswith("x" * 500)


def test_a_terminal_that_is_too_narrow_has_one_value_a_line():
    assert sheet("", HEADINGS, ROWS[:1], width=30) == [
        "id: 3486f3d9",
        "  model: org/[mooncake]-large",
        "  size: 896.0 KiB",
    ]


def test_a_column_that_may_be_folded_is_before_all_are_stacked():
    assert sheet("", ("id", "model~", "size>"), ROWS[:1], width=36) == [
        "id       model                  size",
        "3486f3d9 org/[mooncake]-la 896.0 KiB",
        "         rge",
    ]


@pytest.mark.parametrize("width", [10, 40, 80, 200, None])
def test_no_width_cuts_a_value(width):
    text = "\n".join(sheet("t", HEADINGS, ROWS, width=width))
    assert [value for row in ROWS for value in row if value not in text] == []


def test_pairs_are_folded_between_words_where_they_do_not_fit():
    rows = [("used", "2.6 MiB of 64.0 MiB (4.1%)"), ("taken back from dead writers", "0 B")]
    assert pairs("Pool", rows, width=80) == [
        "Pool",
        "used                          2.6 MiB of 64.0 MiB (4.1%)",
        "taken back from dead writers  0 B",
    ]
    assert pairs("", rows, width=30) == [
        "used: 2.6 MiB of 64.0 MiB",
        "  (4.1%)",
        "taken back from dead writers:",
        "  0 B",
    ]


def test_what_would_steer_a_terminal_is_shown_and_not_obeyed():
    (_, line) = sheet("", ("model",), [("\x1b[31mred\nnext\u202e",)], width=None)
    assert line == r"\x1b[31mred\nnext\u202e"


LARGE = namespace("org/[large]", num_layers=30, num_kv_heads=4)
SPACES = [
    SpaceInfo(LARGE, Shard(0, 30, 0, 2), pages=100, nbytes=1 << 30, oldest_s=400000.0, idle_s=900.0),
    SpaceInfo(LARGE, Shard(0, 30, 2, 4), pages=90, nbytes=1 << 30, oldest_s=300.0, idle_s=5.0),
]


@pytest.mark.parametrize("width", [40, 80, 200, None])
def test_no_terminal_is_too_narrow_for_what_the_pool_holds(width):
    text = "\n".join(tables.spaces_lines(SPACES, width))
    expected = ["bfloat16", "0-29/30", "2-3/4", "90", "1.0 GiB", "4.6 d", "15 min", "5 min", "5 s", "org/[large]"]
    assert [word for word in expected if word not in text] == []


def test_the_shards_of_a_namespace_are_added_up():
    (found,) = tables.namespaces_json(SPACES)
    assert (found["shards"], found["pages"], found["nbytes"]) == (2, 190, 2 << 30)
    assert (found["oldest_s"], found["idle_s"]) == (400000.0, 5.0)


def test_the_pool_has_its_hits_evictions_and_failures_in_its_lines():
    stats = StoreStats(
        "/dev/shm/pool", 8 << 30, 2 << 30, 200, 3 << 20, 1000, hit_tokens=6400, missed_tokens=1600, evicted_pages=17,
        failures={"full": 2, "busy": 0},
    )  # fmt: skip
    text = "\n".join(tables.stats_lines(stats, 80))
    expected = ["/dev/shm/pool", "2.0 GiB of 8.0 GiB (25.0%)", "200", "6,400 (80.0%", "1,600", "17 pages", "full 2"]
    assert [word for word in expected if word not in text] == [] and "busy" not in text


def test_a_user_in_another_container_is_shown_as_such():
    user = PoolUser(pid=7, here=False, host="pod-7", since_s=90.0, command="vllm serve MODEL")
    assert tables.users_lines([user], 200)[2].split("  ") == [
        "pid 7 in another container (host name pod-7)",
        "2 min",
        "vllm serve MODEL",
    ]
    assert "  process" not in "".join(tables.users_lines([user], 40))
    assert "pod-7" in "".join(tables.users_lines([user], 40))


def test_a_tier_that_cannot_grow_for_want_of_room_works_all_the_same():
    state = {"reads": "closed", "writes": "closed"}
    assert tables.tier_state(state) == "works"
    assert tables.tier_state(state | {"notes": {"no room": "uses 1 GiB of its capacity of 2 GiB"}}) == "works, no room"
    assert tables.tier_state(state | {"writes": "open", "cause": "full"}) == "left alone (full)"


def test_a_tier_that_was_never_opened_and_not_asked_yet_does_not_work():
    state = {"reads": "closed", "writes": "closed", "notes": {"not open": "tier disk: /nvme/kv is not there"}}
    assert tables.tier_state(state) == "not open"
    assert tables.tier_state(state | {"reads": "open", "cause": "unavailable"}) == "left alone (unavailable)"
