"""`mooncake-connector top`: figures against the truth, a screen of any width, and the terminal it leaves."""

import contextlib
import http.server
import json
import math
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from ground.terminal import HIDE_CURSOR, OTHER_SCREEN, SCREEN_BACK, SHOW_CURSOR, Terminal, is_stopped
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from simulated.waiting import wait_for
from store.pools import running, space_in
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.cli.top.figures import Engine, Figures, Shown, Tier
from mooncake_connector.cli.top.screen import Screen, draws_bars
from mooncake_connector.cli.top.sources import Said, Sources, series_in
from mooncake_connector.deploy import watch
from mooncake_connector.metrics.registry import AGES_S
from store_client import EmbeddedStore, StoreStats
from store_client.embedded import PoolUser
from store_client.embedded.folder import remove_pool
from store_client.testing import chain, get_page, put_chain

CAPACITY = 4 << 20


def top(*arguments, **options):
    return CliRunner().invoke(app, ["top", *map(str, arguments)], **options)


@contextlib.contextmanager
def serving(text):
    """An engine's /metrics: whatever `text()` says when it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


# Figures

LOAD = """
print('begun', flush=True)
for i in range(200):
    keys = chain(f'{i}', 2)
    hit = space.lookup(keys).pages
    space.record_lookup(hit_pages=1, missed_pages=3, page_tokens=64)
    put_chain(space, keys)
    space.read(keys[:1], lambda i, view: None, nbytes=65536)
    time.sleep(0.005)
sys.stdin.read()
"""


def test_what_is_shown_adds_up_to_what_a_process_did(pool):
    """The rates, times the seconds between looks, are what was looked up, stored and read: none is lost or twice."""
    with EmbeddedStore(pool, CAPACITY) as store:
        sources = Sources(pool, [], 0.05)
        figures = Figures(sources)
        wait_for(lambda: figures.now().stats is not None)
        sums, seen_s, shares = dict.fromkeys(("hit_tokens", "missed_tokens", "stored_pages", "read_pages"), 0.0), 0.0, 0

        def look():
            nonlocal seen_s, shares
            shown = figures.now()
            if shown.rates and figures._looks[-1].at_s != seen_s:
                seen_s = figures._looks[-1].at_s
                shares += shown.hit_share is not None
                for name in sums:
                    sums[name] += shown.rates[name] * shown.span_s
            return shown

        with running(LOAD, pool, "-"):
            wait_for(lambda: look().stats.read_pages == 200)
            wait_for(lambda: look().rates["read_pages"] == 0)
            shown = look()
        stats = store.stats()
        sources.close()
    assert {name: round(value) for name, value in sums.items()} == {
        "hit_tokens": 200 * 64, "missed_tokens": 3 * 200 * 64, "stored_pages": 400, "read_pages": 200,
    }  # fmt: skip
    assert shares > 0 and {share for share in shown.hit_shares if share is not None} == {0.25}
    assert shown.stats.evicted_pages == stats.evicted_pages > 300
    evicted = [age for age, count in zip(AGES_S, stats.evicted_ages, strict=False) for _ in range(count)]
    assert shown.evicted_within_s == evicted[(len(evicted) - 1) // 2]


def test_once_prints_one_interval_as_text_and_as_json(pool):
    with EmbeddedStore(pool, CAPACITY) as store:
        space = space_in(store)
        put_chain(space, chain("a", 3))
        get_page(space, chain("a", 3)[0])
        space.record_lookup(hit_pages=3, missed_pages=1, page_tokens=64)
        result = top("--pool", pool, "--once", "--json", "--interval", 0.2)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        text = top("--pool", pool, "--once", "--interval", 0.2).stdout
    assert (found["pool"]["pages"], found["pool"]["hit_tokens"], found["pool"]["read_pages"]) == (3, 192, 1)
    assert found["span_s"] > 0 and found["per_second"]["hit_tokens"] == 0 and found["hit_share"] is None
    assert found["engines"] == [] and found["tiers"] == [] and found["users"] == []
    assert "75.0% since the pool was made" in text and "3 pages" in text and "No process has the pool open" in text


def test_an_engines_figures_are_rates_of_its_metrics():
    number = 0

    def text():
        nonlocal number
        number += 1
        return (
            f'vllm:mooncake_connector_hit_tokens_total{{engine="0",model_name="m"}} {1000 * number}\n'
            f'vllm:mooncake_connector_hit_tokens_total{{engine="1",model_name="m"}} {1000 * number}\n'
            f'vllm:mooncake_connector_transport_bytes_total{{engine="0",transport="cma"}} {5e6 * number}\n'
            f'vllm:mooncake_connector_transport_bytes_total{{engine="0",transport="tcp"}} 7\n'
            f'vllm:mooncake_connector_prefill_seconds_saved_total{{engine="0"}} {2 * number}\n'
            f'vllm:mooncake_connector_failures_total{{engine="0",cause="load_deadline"}} 3\n'
            'vllm:mooncake_connector_load_duration_seconds_bucket{engine="0",le="0.5"} 3\n'
            f'vllm:prefix_cache_queries_total{{engine="0"}} {400 * number}\n'
            f'vllm:external_prefix_cache_hits_total{{engine="0"}} {100 * number}\n'
            'vllm:num_requests_running{engine="0"} 2.0\n'
        )

    with serving(text) as url:
        result = top("--url", url, "--pool", "/nowhere/at/all", "--once", "--json", "--interval", 0.5)
        assert result.exit_code == 1 and "does not exist" in result.stderr, "a pool that was named has to be there"
        sources = Sources(None, [url, "http://127.0.0.1:9"], 0.2)
        figures = Figures(sources)
        wait_for(lambda: sources.have_answered(2))
        former, latest = sources.engines[url].last_two
        engine, silent = figures.now().engines
        sources.close()
    span_s = latest.at_s - former.at_s
    assert (engine.kind, engine.running, engine.hit_share) == ("vLLM", 2, 0.25)
    assert engine.pool_tokens_s == pytest.approx(2000 / span_s, rel=0.2)
    assert engine.saved_s_s == pytest.approx(2 / span_s, rel=0.2)
    assert engine.transports["tcp"] == 0 and engine.transports["cma"] == pytest.approx(5e6 / span_s, rel=0.2)
    assert engine.failures == {"load_deadline": 3} and engine.sent_nbytes["tcp"] == 7
    assert silent.cause == "no answer"


def engine_of(*answers):
    """Of the last two answers of an engine."""
    sources = Sources(None, [], 1.0)
    sources.engines = {"u": SimpleNamespace(last_two=answers)}
    return Figures(sources).now().engines[0]


def counted(*numbers):
    names = ("hit_tokens_total", 'transport_bytes_total{transport="tcp"}', "prefill_seconds_saved_total")
    lines = [f"vllm:mooncake_connector_{name} {number}" for name, number in zip(names, numbers, strict=False)]
    caches = ("prefix_cache_hits_total", "prefix_cache_queries_total")
    lines += [f"vllm:{name} {number}" for name, number in zip(caches, numbers[len(names) :], strict=True)]
    return series_in("\n".join(lines))


def test_an_engine_that_was_started_again_has_done_what_it_counts_since():
    engine = engine_of(Said(10.0, counted(1000, 9000, 50, 700, 900)), Said(12.0, counted(100, 50, 4, 20, 80)))
    assert (engine.pool_tokens_s, engine.transports, engine.saved_s_s) == (50, {"tcp": 25}, 2)
    assert engine.hit_share == 0.25 and engine.sent_nbytes == {"tcp": 50}


def test_of_an_engine_that_is_gone_nothing_is_shown_and_what_it_counted_in_all_is_no_rate_when_it_is_back():
    said, gone = Said(10.0, counted(1000, 9000, 50, 700, 900)), Said(12.0, None, "no answer")
    assert engine_of(said, gone) == Engine("u", cause="no answer")
    back = engine_of(gone, said)
    assert (back.pool_tokens_s, back.transports, back.hit_share) == (0, {"tcp": 0}, None)
    assert back.sent_nbytes == {"tcp": 9000}


def test_no_more_tokens_are_hits_than_were_asked_for():
    """An engine may count a request's hits and its prompt on either side of a look."""
    assert engine_of(Said(10.0, counted(0, 0, 0, 100, 100)), Said(12.0, counted(0, 0, 0, 200, 150))).hit_share == 1.0


def test_another_pool_in_the_place_of_the_one_before_begins_to_count_anew():
    sources = Sources(None, [], 1.0)
    figures, at_s = Figures(sources), 0.0

    def look(name, hit_tokens):
        nonlocal at_s
        at_s += 2.0
        stats = StoreStats("/pool", 100, 50, 1, 1, 1, hit_tokens=hit_tokens, missed_tokens=hit_tokens)
        sources.looks = SimpleNamespace(latest=Said(at_s, (name, stats)))
        return figures.now()

    assert [look("a", 1000).rates, look("a", 1100).rates["hit_tokens"]] == [{}, 50]
    assert (look("b", 10).rates, look("b", 10).hit_share) == ({}, None)
    assert look("b", 30).rates["hit_tokens"] == 10 and figures.now().hit_shares == [None, 0.5]


def test_an_engine_that_ends_is_said_to_be_gone():
    with serving(lambda: 'vllm:num_requests_running{engine="0"} 7.0\n') as url:
        sources = Sources(None, [url], 0.05)
        figures = Figures(sources)
        wait_for(lambda: figures.now().engines[0].running == 7)
    wait_for(lambda: figures.now().engines == [Engine(url, cause="no answer")])
    sources.close()


def test_a_page_that_is_far_too_long_is_no_answer(monkeypatch):
    page = 'vllm:num_requests_running{engine="0"} 7.0\n'
    with serving(lambda: page) as url:
        assert watch.read(f"{url}/metrics") == page
        monkeypatch.setattr(watch, "_MAX_NBYTES", len(page) - 1)
        assert watch.read(f"{url}/metrics") is None


@pytest.mark.parametrize("page", [
    "<html>It works</html>", "vllm:num_requests_running{ 2", "other_total 7", "", "mooncake_connector_pool_pages 3",
])  # fmt: skip
def test_a_page_without_an_engines_metrics_is_said_to_be_none_and_shows_no_zeros(page):
    with serving(lambda: page) as url:
        sources = Sources(None, [url], 0.2)
        wait_for(lambda: sources.have_answered(1))
        shown = Figures(sources).now()
        sources.close()
    (row,) = [line.plain.split() for line in Screen(100).lines(shown) if line.plain.startswith("127.0.0.1:")]
    assert row[1:] == ["no", "engine's", "metrics"]
    assert Screen(100).line(shown).endswith(f"{url} no engine's metrics")


@pytest.mark.parametrize("metric, words", [
    ("vllm:num_requests_running", "no connector"), ("sglang:num_running_reqs", "pool not used"),
])  # fmt: skip
def test_an_engine_without_the_connector_is_said_to_be_so_and_shows_no_zeros(metric, words):
    with serving(lambda: f'{metric}{{engine="0"}} 7.0\n') as url:
        sources = Sources(None, [url], 0.2)
        wait_for(lambda: sources.have_answered(2))
        shown = Figures(sources).now()
        sources.close()
    for width in (60, 80, 200):
        (row,) = [line.plain for line in Screen(width).lines(shown) if line.plain.startswith(":")]
        assert words in row and "0 B/s" not in row and "0.0" not in row
    assert Screen(100).line(shown).endswith(f"{url} - {words}")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_once_fails_only_where_none_of_the_engines_says_anything(pool, more):
    """Which ones, and why, is on stderr; what is known of the pool is on stdout all the same."""
    silent, page = "http://127.0.0.1:9", 'vllm:num_requests_running{engine="0"} 7.0\n'
    with EmbeddedStore(pool, CAPACITY), serving(lambda: page) as url, serving(lambda: "<html>") as other:
        arguments = ("--pool", pool, "--once", "--interval", 0.2, *more)
        failed = top(*arguments, "--url", silent, "--url", other)
        in_part = top(*arguments, "--url", silent, "--url", url)
    assert failed.exit_code == 1 and (json.loads(failed.stdout)["pool"] if more else "of 4.0 MiB" in failed.stdout)
    assert failed.stderr.splitlines() == [f"error: {silent}: no answer", f"error: {other}: no engine's metrics"]
    assert (in_part.exit_code, in_part.stderr) == (0, "")


def test_once_fails_where_the_pool_gives_no_figures_though_an_engine_does(pool):
    with EmbeddedStore(pool, CAPACITY):
        pass
    for table in pool.glob("*/table"):
        table.unlink()
    with serving(lambda: 'vllm:num_requests_running{engine="0"} 7.0\n') as url:
        failed = top("--pool", pool, "--once", "--interval", 0.2, "--url", url)
    assert failed.exit_code == 1 and f"pool {pool} gives no figures" in failed.stderr


def test_a_configured_pool_that_cannot_be_read_is_said_beside_the_engines(tmp_path, monkeypatch):
    """And the engines are shown beside it, on the screen and in lines."""
    (tmp_path / "pool").touch()
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(tmp_path / "pool"))
    monkeypatch.setenv("COLUMNS", "200")
    with serving(lambda: 'vllm:num_requests_running{engine="0"} 7.0\n') as url:
        text, found = (top("--url", url, "--once", "--interval", 0.2, *more) for more in ([], ["--json"]))
        assert "no pool" in text.stdout and url.removeprefix("http://127.0.0.1") in text.stdout and text.exit_code == 0
        assert "is not a pool" in json.loads(found.stdout)["cause"]
        sources = Sources(None, [url], 0.2, "it is not a pool")
        wait_for(lambda: sources.have_answered(1))
        assert f"no pool: it is not a pool  {url} -" in Screen(100).line(Figures(sources).now())
        sources.close()


def test_sglangs_metrics_are_read_as_well():
    series = series_in(
        'mooncake_connector_bytes_total{operation="load"} 8\nmooncake_connector_bytes_total{operation="save"} 2\n'
        'mooncake_connector_failures_total{operation="load",cause="late"} 1\nsglang:num_running_reqs{tp="0"} 4\n'
        "somebody_elses_total 7\nsglang:cached_tokens_total NaN\n"
    )
    assert series == {
        "mooncake_connector_bytes_total": {"load": 8, "save": 2},
        "mooncake_connector_failures_total": {"late,load": 1},
        "sglang:num_running_reqs": {"": 4},
    }


@pytest.mark.parametrize("arguments, code, told", [
    (["--json"], 2, "--once"), (["--url", "ftp://x"], 2, "http://HOST:PORT"), (["--interval", "0"], 2, "0.2"),
    (["--pool", "/nowhere/at/all"], 1, "does not exist"),
])  # fmt: skip
def test_what_cannot_be_done_is_told(arguments, code, told):
    result = top(*arguments)
    assert result.exit_code == code and told in result.stderr


# The screen

texts = st.text(st.characters(codec="utf-8"), max_size=60)
shares = st.none() | st.floats(0, 1)
rates = st.floats(0, 1e13)
counts = st.integers(0, 10**15)
engines = st.builds(
    Engine, url=texts, cause=st.sampled_from(["", "no answer"]), kind=st.sampled_from(["", "vLLM", "SGLang"]),
    running=counts, waiting=counts, hit_share=shares, pool_tokens_s=rates, load_nbytes_s=rates, save_nbytes_s=rates,
    saved_s_s=rates, transports=st.dictionaries(texts, rates, max_size=2),
    sent_nbytes=st.dictionaries(texts, rates, max_size=2), failures=st.dictionaries(texts, rates, max_size=2),
)  # fmt: skip
tiers = st.builds(
    Tier, st.fixed_dictionaries({"title": texts, "reads": st.sampled_from(["open", "closed"]), "used_nbytes": counts}),
    rates, rates, shares,
)  # fmt: skip
users = st.builds(PoolUser, st.none() | st.integers(1, 4 << 20), st.booleans(), texts, st.floats(0, 1e8), texts)
pools = st.builds(
    StoreStats, texts, counts, counts, counts, counts, counts, hit_tokens=counts, missed_tokens=counts,
    corrupt_pages=counts, failures=st.dictionaries(texts, counts, max_size=3),
)  # fmt: skip
everything = st.builds(
    Shown, unix_s=st.floats(0, 2e9), pool=st.none() | texts, stats=st.none() | pools, cause=texts,
    gone_s=st.floats(0, 1e9), span_s=st.floats(0, 1e4),
    rates=st.dictionaries(st.sampled_from(["hit_tokens", "read_nbytes", "evicted_pages"]), rates),
    hit_shares=st.lists(shares, max_size=80), evicted_within_s=st.none() | st.sampled_from([*AGES_S, math.inf]),
    users=st.none() | st.lists(users, max_size=3), tiers=st.lists(tiers, max_size=2), agent_cause=texts,
    engines=st.lists(engines, max_size=2),
)  # fmt: skip


@settings(max_examples=60)
@given(everything, st.integers(40, 200), st.booleans())
def test_no_line_is_wider_than_the_terminal(shown, width, bars):
    for line in Screen(width, bars=bars).lines(shown):
        assert cell_len(line.plain) <= width and "\n" not in line.plain and "\x1b" not in line.plain


@pytest.mark.parametrize("width", [60, 80])
def test_why_there_is_no_pool_is_said_to_its_end(width):
    cause = "pool folder /a/pool does not exist: an engine creates its pool when it starts, and `pool` says where"
    shown = Shown(0.0, None, None, cause, 0.0, 0.0, {}, [], None, None, [], "", [])
    assert cause in " ".join(" ".join(line.plain.split()) for line in Screen(width).lines(shown))


@given(pools, st.integers(40, 200))
def test_what_matters_is_there_at_any_width(stats, width):
    shown = Shown(0.0, "/pool", stats, "", 0.0, 2.0, {}, [0.5], None, [], [], "", [])
    text = "\n".join(line.plain for line in Screen(width).lines(shown))
    words = ["50.0% now", "hit rate", "tokens", "read", "stored", "fill", "evicted", f"{stats.pages:,} pages"]
    assert [word for word in words if word not in text] == []


def test_a_terminal_that_has_no_bars_gets_plain_letters():
    stats = StoreStats("/pool", 100, 50, 1, 1, 1)
    shown = Shown(0.0, "/pool", stats, "", 0.0, 2.0, {}, [0.0, None, 1.0], None, [], [], "", [])
    lines = Screen(80, bars=draws_bars("ascii")).lines(shown)
    assert all(line.plain.isascii() for line in lines) and "_ #  100.0% now" in lines[1].plain + lines[2].plain
    assert draws_bars("utf-8") and not draws_bars(None) and not draws_bars("no such encoding")


# In a terminal


def test_it_follows_a_pool_that_is_cleared_resized_removed_and_made_anew_and_leaves_the_terminal_as_it_was(pool):
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(space_in(store), chain("a", 3))
        with Terminal("top", "--pool", str(pool), "--interval", "0.2") as terminal:
            terminal.shows("3 pages")
            assert OTHER_SCREEN in terminal.drawn and HIDE_CURSOR in terminal.drawn
            assert "of 4.0 MiB" in terminal.frame() and max(map(cell_len, terminal.frame().splitlines())) <= 80
            store.clear()
            terminal.shows("0 B of 4.0 MiB")
            with EmbeddedStore(pool, 8 << 20):
                terminal.shows("of 8.0 MiB")
            store.close()
            remove_pool(pool)
            terminal.shows("there is no pool in")
            with EmbeddedStore(pool, 2 << 20) as other:
                put_chain(space_in(other), chain("a", 2))
                terminal.shows("of 2.0 MiB")
                terminal.resize(44, 12)
                wait_for(lambda: 0 < max(map(cell_len, terminal.frame().splitlines() or [""])) <= 44)
                terminal.process.send_signal(signal.SIGWINCH)
                terminal.shows("2 pages")
            assert terminal.ends(signal.SIGTERM) == 0
            assert terminal.drawn.rindex(SCREEN_BACK) > terminal.drawn.rindex(OTHER_SCREEN)
            assert terminal.drawn.rindex(SHOW_CURSOR) > terminal.drawn.rindex(HIDE_CURSOR)
            assert terminal.attributes == terminal.before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_ends_leave_the_terminal_as_it_was_too(pool, number):
    with EmbeddedStore(pool, CAPACITY), Terminal("top", "--pool", str(pool), "--interval", "0.2") as terminal:
        terminal.shows("since the pool was made")
        assert terminal.ends(number) == 0
        assert terminal.drawn.rindex(SCREEN_BACK) > terminal.drawn.rindex(OTHER_SCREEN)
        assert terminal.drawn.rindex(SHOW_CURSOR) > terminal.drawn.rindex(HIDE_CURSOR)
        assert terminal.attributes == terminal.before


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(pool):
    with EmbeddedStore(pool, CAPACITY), Terminal("top", "--pool", str(pool), "--interval", "0.2") as terminal:
        terminal.shows("since the pool was made")
        terminal.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: is_stopped(terminal.process.pid))
        assert terminal.read().rindex(SCREEN_BACK) > terminal.drawn.rindex(OTHER_SCREEN)
        terminal.process.send_signal(signal.SIGCONT)
        wait_for(lambda: terminal.read().rindex(OTHER_SCREEN) > terminal.drawn.rindex(SCREEN_BACK))
        assert terminal.ends(signal.SIGTERM) == 0


@pytest.mark.parametrize("columns, lines", [(60, 40), (80, 40), (80, 3), (40, 1)])
def test_the_screen_fits_a_terminal_of_any_size_the_first_lines_first(pool, columns, lines):
    terminal = Terminal("top", "--pool", str(pool), "--interval", "0.2", columns=columns, lines=lines)
    with EmbeddedStore(pool, CAPACITY), terminal:
        terminal.shows("hit rate" if lines > 1 else "mooncake")
        frame = terminal.frame().splitlines()
        assert len(frame) <= lines and max(map(cell_len, frame)) <= columns and frame[0].startswith("mooncake")
        assert terminal.ends(signal.SIGTERM) == 0


@pytest.mark.parametrize("environ, coloured", [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_without_colours_gets_none(tmp_path, environ, coloured):
    """A pool that cannot be read is red elsewhere."""
    (tmp_path / "pool").touch()
    environ = {"MOONCAKE_CONNECTOR_POOL": str(tmp_path / "pool"), **environ}
    with Terminal("top", "--url", "http://127.0.0.1:9", "--interval", "0.2", environ=environ) as terminal:
        terminal.shows("no pool")
        assert OTHER_SCREEN in terminal.drawn
        assert bool(re.search(r"\x1b\[(?:[0-9]+;)*[349][0-7][;m]", terminal.drawn)) is coloured
        assert terminal.ends(signal.SIGTERM) == 0


@pytest.mark.parametrize("once", [[], ["--once"]])
def test_a_dumb_terminal_gets_words_alone(pool, once):
    with EmbeddedStore(pool, CAPACITY):
        arguments = ("top", "--pool", str(pool), "--interval", "0.2", *once)
        with Terminal(*arguments, environ={"TERM": "dumb"}) as terminal:
            if once:
                assert "since the pool was made" in terminal.printed()
            else:
                wait_for(lambda: terminal.read().count("fill 0.0%") >= 2)
                assert terminal.ends(signal.SIGTERM) == 0
            assert "\x1b" not in terminal.drawn


def test_where_stdout_is_no_terminal_there_is_a_line_for_each_interval(pool):
    with EmbeddedStore(pool, CAPACITY):
        command = [sys.executable, "-m", "mooncake_connector.cli.entry", "top", "--pool", pool, "--interval", "0.2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(3)]
            process.terminate()
            rest = process.stdout.read()
    assert process.returncode == 0 and "\x1b" not in "".join(lines) + rest
    assert all("hit -  0 tokens/s" in line and "fill 0.0%" in line for line in lines)
