"""Files that a person names and that are pipes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_connector import pipes
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.routing.trace import read_trace as read_bench_trace
from mooncake_connector.cli.main import app
from mooncake_connector.cli.why.prompt import read_tokens
from store_client.simulation.traces import read_trace

LINE = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7]}\n'


@pytest.fixture
def pipe(tmp_path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.fixture
def model(tmp_path) -> Path:
    config = '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "bfloat16"}'
    (tmp_path / "config.json").write_text(config)
    return tmp_path


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 1
    return result.output


def test_one_that_nobody_writes_to_is_refused_by_its_name(pipe, model, monkeypatch):
    monkeypatch.setattr(pipes, "_WRITER_S", 0.05)
    refusal = "it is a pipe that nobody writes to"
    tokens = said("why", "--tokens", pipe, "--model", model)
    assert refusal in tokens and str(pipe) in tokens
    trace = said("simulate", pipe, "--model", model)
    assert refusal in trace and str(pipe) in trace
    with pytest.raises(BenchError, match=f"{pipe} cannot be read: {refusal}"):
        read_bench_trace(pipe)


@pytest.mark.parametrize("read, text", [(read_tokens, "[1, 2]"), (read_trace, LINE), (read_bench_trace, LINE)])
def test_one_that_is_written_to_is_read_to_its_end(pipe, read, text):
    (pipe.parent / "file").write_text(text)
    writing = threading.Thread(target=lambda: pipe.write_text(text))
    writing.start()
    assert read(pipe) == read(pipe.parent / "file")
    writing.join(60)


def test_what_a_shell_puts_in_place_of_a_command_is_read_to_its_end():
    """`<(...)`: it has a writer from its beginning, or had one, and is not waited for."""
    end, start = os.pipe()
    os.write(start, b"[1, ")
    reading = threading.Timer(0, lambda: (os.write(start, b"2]"), os.close(start)))
    reading.start()
    assert read_tokens(Path(f"/dev/fd/{end}")) == [1, 2]
    reading.join(60)
    os.close(end)
