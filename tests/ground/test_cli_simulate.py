"""`mooncake-connector simulate`: the table, the sentence, the picture, and what it says of wrong arguments."""

import json
import random
import sys

import pytest
from typer.testing import CliRunner

from mooncake_connector.cli.main import app

runner = CliRunner()


@pytest.fixture
def files(tmp_path):
    """A trace of 60 prompts over 20 prefixes, and a model whose KV takes 1 KiB a token: a block is 512 KiB."""
    rng, lines = random.Random(1), []
    for i in range(60):
        prefix = rng.randrange(20)
        blocks = [100 * prefix + j for j in range(4)] + [10_000 + i]
        lines.append({"timestamp": 1000 * i, "input_length": 512 * 5, "output_length": 1, "hash_ids": blocks})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = {**shape, "hidden_size": 128, "torch_dtype": "bfloat16", "model_type": "llama", "vocab_size": 100}
    (model / "config.json").write_text(json.dumps(config))
    return trace, model


def simulate(files, *arguments):
    trace, model = files
    return runner.invoke(app, ["simulate", str(trace), "--model", str(model), *arguments])


def test_the_table_has_every_size_and_policy_and_the_sentence_says_which(files):
    result = simulate(files, "--capacity", "4MiB..128MiB")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "trace.jsonl: 60 requests, 153,600 prompt tokens" and lines[1].split()[:4] == [
        "capacity", "lru", "s3-fifo", "auto",
    ]  # fmt: skip
    sizes = [line.split()[0] for line in lines[2:8]]
    assert sizes == ["4.0", "8.0", "16.0", "32.0", "64.0", "128.0"]
    assert lines[-2].endswith("at 10,000 tokens/s (--prefill).")
    assert "gives" in lines[-1] and "doubling it" in lines[-1]


def test_where_nothing_comes_again_no_size_is_advised(files):
    trace, _ = files
    lines = ({"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [at]} for at in range(20))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = simulate(files, "--capacity", "4MiB..16MiB")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("Nothing hits at any of these sizes: ")


def test_json_has_the_figures_of_one_policy_and_more_memory_finds_more(files):
    result = simulate(files, "--capacity", "4MiB,128MiB", "--policy", "lru", "--prefill", "1000", "--json")
    small, large = json.loads(result.output)
    assert [each["capacity_nbytes"] for each in (small, large)] == [4 << 20, 128 << 20]
    assert 0 < small["hit_rate"] < large["hit_rate"] and large["evicted_pages"] == 0 < small["evicted_pages"]
    assert large["prefill_saved_s"] == pytest.approx(large["hit_tokens"] / 1000, abs=0.1)


def test_shares_are_of_the_trace_s_different_pages(files):
    result = simulate(files, "--capacity", "50%,2.5%,100%,1MiB", "--policy", "lru", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    pages = 20 * 4 + 60  # nearly: of the prefixes, those that came
    assert found[0]["capacity_nbytes"] == 1 << 20
    assert pages * 0.9 * 512 * 1024 <= found[-1]["capacity_nbytes"] <= pages * 512 * 1024
    assert found[-2]["capacity_nbytes"] * 2 == found[-1]["capacity_nbytes"]
    assert found[-1]["evicted_pages"] == 0 < found[-2]["evicted_pages"]


def test_the_picture_is_a_png(files, tmp_path):
    picture = tmp_path / "sizes.png"
    result = simulate(files, "--capacity", "8MiB..32MiB", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


def test_without_matplotlib_a_picture_is_an_error_that_says_what_to_install(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("mooncake_connector.cli.sweep_plot.find_spec", lambda name: None)
    result = simulate(files, "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 1 and "pip install 'mooncake-connector[plot]'" in result.output
    assert simulate(files, "--capacity", "8MiB", "--policy", "lru").exit_code == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--capacity", "lots"], "expected an integer with an optional unit"),
        (["--capacity", "64MiB..8MiB"], "expected a range such as"),
        (["--capacity", "0%"], "expected a range such as"),
        (["--capacity", "1B..1TiB"], "expected a range such as"),
        (["--capacity", "9TiB"], "a pool has at most 8.0 TiB"),
        (["--capacity", "64"], "64 B is less than a pool may have, 1.0 MiB: give it a unit, as in 64GiB"),
        (["--capacity", "64..128"], "give it a unit"),
        (["--capacity", "8GiB,64"], "give it a unit"),
        (["--plot", "/nonexistent/x.png"], "there is no folder /nonexistent"),
        (["--plot", "/tmp"], "/tmp cannot be written"),
        (["--capacity", "1%..5%"], "expected an integer with an optional unit"),
        (["--policy", "fifo"], "is none of lru"),
        (["--kv-dtype", "int3"], "is none of bfloat16"),
    ],
)
def test_wrong_arguments_are_named(files, arguments, said):
    result = simulate(files, *arguments)
    assert result.exit_code == 2 and said in " ".join(result.output.replace("│", "").split())


def test_a_file_that_is_no_trace_is_named(files):
    files[0].write_text("hello\n")
    result = simulate(files)
    assert result.exit_code == 1 and "line 1 is no JSON" in result.output
