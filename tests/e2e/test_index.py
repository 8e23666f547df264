"""An agent beside a real vLLM: over HTTP it says of a prompt what the server then finds in the pool."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from agent.asking import Client
from typer.testing import CliRunner

from e2e.conftest import Shared
from e2e.hosts import Agent
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.process import free_port
from e2e.questions import draw_tokens
from mooncake_connector.cli.main import app


@pytest.fixture
def index(shared: Shared, logs: Path, tmp_path: Path) -> Iterator[Client]:
    """A client that has the token."""
    client, file = Client(free_port(), "a token of the test"), tmp_path / "token"
    file.write_text(client.token)
    file.chmod(0o600)
    settings = {"agent_http_port": str(client.port), "agent_http_token_file": str(file)}
    env = {f"MOONCAKE_CONNECTOR_{name.upper()}": value for name, value in settings.items()}
    agent = Agent(shared.pool, logs / "index-agent.log", env)
    agent.start()
    try:
        wait_for(lambda: answers(client), "an index")
        yield client
    finally:
        agent.stop()


def answers(client: Client) -> bool:
    with suppress(OSError):
        return client.ask("GET", "/health").status == 200
    return False


def test_what_the_index_says_of_a_prompt_is_what_the_server_finds(shared: Shared, index: Client, qwen3: Path) -> None:
    server, name = shared.server, qwen3.name
    pages = Pages(shared.pool, qwen3, lambda: server)
    prompt = draw_tokens(random.Random(18), 5 * PAGE_TOKENS + 17)

    def said_and_found() -> tuple[int, int]:
        """Tokens, by the index and then by the server, after which it has saved what it did not find."""
        said = index.query(prompt, model=name)["default"]["one"]
        tokens = int(said["CPU"])
        assert said == {"longest_matched": tokens, "GPU": 0, "CPU": tokens, "DISK": 0, "DP": {"0": tokens}}
        server.reset_prefix_cache()
        found = server.ask(prompt, max_tokens=1).cached_tokens
        pages.wait_for(prompt)
        return tokens, found

    first = draw_tokens(random.Random(19), 2 * PAGE_TOKENS)  # its pages say what the pool calls the model
    server.compute(first)
    pages.wait_for(first)
    assert "remark" not in index.register("one", modelname=name)
    assert replace(index, token="").ask("POST", "/query", {"model": name}).status == 401
    assert said_and_found() == (0, 0)
    assert said_and_found() == (5 * PAGE_TOKENS, 5 * PAGE_TOKENS)
    pages.remove(prompt, 2)
    assert said_and_found() == (2 * PAGE_TOKENS, 2 * PAGE_TOKENS)
    cleared = CliRunner().invoke(app, ["store", "clear", "--yes", "--pool", str(shared.pool)])
    assert cleared.exit_code == 0, cleared.output
    assert said_and_found() == (0, 0)
