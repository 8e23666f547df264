"""What the pages say exists: links, paths, commands, settings and examples that parse."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import yaml

from mooncake_connector.cli.main import app
from mooncake_connector.config.file import tomllib
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import ENV_FILE, ENV_PREFIX, environ_name, load_config

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TOP_LEVEL = ("mooncake_connector", "store_client", "transfer", "vllm_plugin", "sglang_backend", "tests", "docs")
BEYOND_THE_SCHEMA = {ENV_FILE, ENV_PREFIX + "PORT", ENV_PREFIX + "STRESS_S"}
"""Variables that name the configuration file, that Kubernetes makes of a Service, and that only tests read."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def fences(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of each fenced block."""
    for found in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield found[1], found[2]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What GitHub names the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """Links inside the repository that lead nowhere, with the reason."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        if not other.exists():
            broken.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(text if other == page else text_of(other)):
            broken.append(f"{target}: no such heading")
    return broken


def missing_paths(text: str) -> list[str]:
    """Paths below the repository's folders that are spelled out in `code` and do not exist."""
    spelled = re.findall(r"`((?:" + "|".join(TOP_LEVEL) + r")/[\w./-]*)(?:::\w+)?`", text)
    return [path for path in spelled if not (REPOSITORY / path).exists()]


def unknown_variables(text: str) -> set[str]:
    known = {environ_name(field) for field in Config.__struct_fields__} | BEYOND_THE_SCHEMA
    return {name for name in re.findall(rf"\b{ENV_PREFIX}[A-Z_]*[A-Z]\b", text) if name not in known}


def unknown_commands(text: str) -> list[str]:
    """`mooncake-connector ...` at the beginning of code that the command line does not know, down to its options."""
    code = [line for _, content in fences(text) for line in content.splitlines()]
    code += re.findall(r"^    (\S.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", prose(text))
    called = [found for line in code for found in re.findall(r"^\s*mooncake-connector +([^#|;)]*)", line)]
    return [command for command in called if not is_known(command.split())]


def is_known(words: list[str]) -> bool:
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        names = words.pop(0).split("|")
        if any(name not in command.commands for name in names):
            return False
        command = command.commands[names[0]]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    return all(word.split("=")[0] in options for word in words if word.startswith("-"))


def engine_json(text: str) -> list[str]:
    """The JSON of each --kv-transfer-config that is written out."""
    return re.findall(r"--kv-transfer-config[=\s\\]*'?(\{.*?\})'", text, re.DOTALL)


@pages
def test_links_lead_somewhere(page):
    assert broken_links(page, text_of(page)) == []


@pages
def test_paths_exist(page):
    assert missing_paths(text_of(page)) == []


@pages
def test_commands_and_options_exist(page):
    assert unknown_commands(text_of(page)) == []


@pages
def test_variables_exist(page):
    assert unknown_variables(text_of(page)) == set()


@pages
def test_targets_of_make_exist(page):
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE)
    commands = re.findall(r"(?:^|`)make ([a-z-]+)", text_of(page), re.MULTILINE)
    assert [command for command in commands if command not in targets] == []


@pages
def test_examples_parse(page):
    parsers = {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text))}
    for language, content in fences(text_of(page)):
        if language in parsers:
            assert parsers[language](content), content


@pages
def test_the_engines_json_is_accepted(page):
    for written in engine_json(text_of(page)):
        settings = json.loads(written)
        assert settings["kv_connector"] == "MooncakeKVConnector" and settings["kv_role"] in (
            "kv_both", "kv_producer", "kv_consumer",
        )  # fmt: skip
        load_config(settings.get("kv_connector_extra_config"), {})


def test_readme_and_pages_are_looked_at():
    assert len(PAGES) > 6 and any(engine_json(text_of(page)) for page in PAGES)


@pytest.mark.parametrize(
    "text",
    [
        "[x](docs/nowhere.md)",
        "[x](#no-such-heading)\n# Another heading",
        "[x](docs/store.md#no-such-heading)",
    ],
)
def test_a_broken_link_is_found(text):
    assert len(broken_links(REPOSITORY / "README.md", text)) == 1


def test_a_link_that_leads_somewhere_is_not_found():
    text = "[x](docs/store.md#put-and-get), [y](#one-heading-here), [z](https://example.org)\n# One heading, here"
    assert broken_links(REPOSITORY / "README.md", text) == []


def test_a_path_that_does_not_exist_is_found():
    assert missing_paths("`transfer/` `store_client/embeded/pool.py` `tests/repo/test_docs.py::test_x`") == [
        "store_client/embeded/pool.py"
    ]


@pytest.mark.parametrize(
    "line",
    ["    mooncake-connector store stat", "```\nmooncake-connector store ls --jason\n```", "`mooncake-connector x`"],
)
def test_an_unknown_command_is_found(line):
    assert len(unknown_commands(line)) == 1


@pytest.mark.parametrize("line", ["    mooncake-connector store ls --json | jq .[0]", "`mooncake-connector --help`"])
def test_a_known_command_is_not_found(line):
    assert unknown_commands(line) == []


def test_an_unknown_variable_is_found():
    assert unknown_variables("MOONCAKE_CONNECTOR_POOL=/x MOONCAKE_CONNECTOR_POOLS=/y") == {"MOONCAKE_CONNECTOR_POOLS"}


def messages_in_the_source() -> set[str]:
    """Every text of the packages, with "..." for what is filled in when the program runs."""
    found = set()
    for package in TOP_LEVEL[:5]:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(re.sub(r"%[-.\d]*[sdrfg]", "...", node.value))
    return found


def test_messages_that_troubleshooting_explains_are_those_of_the_program():
    text = text_of(REPOSITORY / "docs" / "troubleshooting.md")
    sources = messages_in_the_source()
    quoted = [message for message in re.findall(r"`([^`\n]+)`", text) if re.search(r"[a-z]+ .*\.\.\.", message)]
    assert len(quoted) > 40
    unknown = []
    for message in quoted:
        parts = [re.escape(part.strip(" :;,")) for part in message.split("...") if part.strip(" :;,'")]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        if not any(pattern.search(source) for source in sources):
            unknown.append(message)
    assert not unknown, "the program has no such message (any more):\n" + "\n".join(unknown)
