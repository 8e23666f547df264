"""What is written down twice says the same."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import msgspec

import mooncake_connector
from mooncake_connector import quick_start
from mooncake_connector.config.docs import render
from mooncake_connector.config.schema import Config
from mooncake_connector.deploy import docs as deploy_docs
from mooncake_connector.metrics import docs as metrics_docs

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("mooncake_connector", "sglang_backend", "store_client", "transfer", "vllm_plugin")


def test_the_configuration_page_is_what_the_schema_generates():
    page = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")
    assert page == render(), "run: python -m mooncake_connector.config.docs > docs/configuration.md"


def test_the_configuration_page_describes_every_field():
    headings = re.findall(r"^### `(\w+)`$", render(), re.MULTILINE)
    assert headings == [field.name for field in msgspec.structs.fields(Config)]


def test_the_generator_prints_the_page():
    command = [sys.executable, "-m", "mooncake_connector.config.docs"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
    assert printed == render()


def test_the_deployment_page_and_schema_are_what_the_schema_generates():
    docs = REPOSITORY / "docs"
    page = (docs / "deployment.md").read_text("utf-8")
    assert page == deploy_docs.render(), "run: python -m mooncake_connector.deploy.docs > docs/deployment.md"
    schema = (docs / "deployment.schema.json").read_text("utf-8")
    assert schema == deploy_docs.schema_text(), "run: mooncake-connector up --schema > docs/deployment.schema.json"


def test_the_page_of_metrics_is_what_the_registry_generates():
    page = (REPOSITORY / "docs" / "metrics.md").read_text("utf-8")
    assert page == metrics_docs.render(), "run: python -m mooncake_connector.metrics.docs > docs/metrics.md"


def test_the_package_has_the_version_of_the_distribution():
    declared = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert declared and declared[1] == mooncake_connector.__version__


def test_the_readme_begins_with_the_quick_start_that_the_command_line_shows():
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    assert [command for command in (quick_start.VLLM, quick_start.SGLANG) if command not in readme] == []


def bound_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What statements give a name to, those inside of functions and classes left out."""
    found: dict[str, ast.stmt] = {}
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[one.name] = one
        elif isinstance(one, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0]: one for alias in one.names}
        else:
            inner = [each for each in ast.iter_child_nodes(one) if isinstance(each, ast.stmt)]
            names = [] if inner else [each for each in ast.walk(one) if isinstance(each, ast.Name)]
            found |= {each.id: one for each in names if isinstance(each.ctx, ast.Store)} | bound_in(inner)
    return found


def is_there(target: str) -> bool:
    """Whether one of our modules has what a dotted name says; of a class with bases any member."""
    parts = target.split(".")
    module, *rest = next(
        [file, *parts[stop:]]
        for stop in range(len(parts), 0, -1)
        for end in (".py", "/__init__.py")
        if (file := Path(f"{REPOSITORY.joinpath(*parts[:stop])}{end}")).exists()
    )
    bound = bound_in(ast.parse(Path(module).read_text("utf-8")).body)
    if not rest or rest[0] not in bound:
        return not rest
    owner = bound[rest[0]]
    return len(rest) == 1 or not isinstance(owner, ast.ClassDef) or bool(owner.bases) or rest[1] in bound_in(owner.body)


def test_what_the_tests_replace_by_name_is_there():
    """Also in tests that another environment runs."""
    targets = {}
    for file in (REPOSITORY / "tests").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "setattr" and call.args:
                name = getattr(call.args[0], "value", None)
                if isinstance(name, str) and name.startswith(tuple(f"{package}." for package in PACKAGES)):
                    targets[name] = f"{file.relative_to(REPOSITORY)}:{call.lineno}: {name}"
    assert len(targets) > 20 and [where for name, where in targets.items() if not is_there(name)] == []
    gone = ["store_client.agent.tiered._FIRST_WORD_S", "store_client.agent.client.Client.gone", "store_client.gone.X"]
    assert not any(map(is_there, gone))
