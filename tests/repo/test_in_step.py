"""What is written down twice says the same."""

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

REPOSITORY = Path(__file__).parents[2]


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


def test_the_package_has_the_version_of_the_distribution():
    declared = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert declared and declared[1] == mooncake_connector.__version__


def test_the_readme_begins_with_the_quick_start_that_the_command_line_shows():
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    assert [command for command in (quick_start.VLLM, quick_start.SGLANG) if command not in readme] == []
