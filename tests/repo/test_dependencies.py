"""Imports go downwards only, and nothing but an adapter imports an engine (docs/architecture.md)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

GROUND, FIRST, SECOND, ROOF = 0, 1, 2, 3
FLOORS = {
    "mooncake_connector": GROUND,
    "store_client": FIRST,
    "transfer": FIRST,
    "vllm_plugin": SECOND,
    "sglang_backend": SECOND,
}
# It belongs to the ground's package, and looks down from the roof.
ON_THE_ROOF = ("mooncake_connector.cli",)
MAY_IMPORT_ENGINE = {
    "vllm": {"vllm_plugin"},
    "sglang": {"sglang_backend"},
    "torch": {"vllm_plugin", "sglang_backend"},
}
ADAPTERS = ("vllm_plugin", "sglang_backend")
# An adapter opens whatever store the configuration names (store_client/open.py).
BACK_ENDS = ("store_client.embedded", "store_client.EmbeddedStore")


def violations(module: str, source: str) -> list[str]:
    """One line for each import in `source`, the text of `module`, that the rules forbid."""
    return [
        f"{module}:{line} imports {target}: {reason}"
        for line, target in imports(module, source)
        if (reason := why_forbidden(module, target))
    ]


def why_forbidden(module: str, target: str) -> str | None:
    package, other = module.partition(".")[0], target.partition(".")[0]
    if other in MAY_IMPORT_ENGINE:
        return None if package in MAY_IMPORT_ENGINE[other] else "only an adapter imports an engine"
    if package in ADAPTERS and f"{target}.".startswith(tuple(f"{name}." for name in BACK_ENDS)):
        return "an adapter knows no back end of the store"
    if other not in FLOORS or unit(module) == unit(target):
        return None
    return None if floor(target) < floor(module) else "imports go downwards only"


def unit(module: str) -> str:
    """What may import itself freely: a package, or a part of the roof."""
    for part in ON_THE_ROOF:
        if module == part or module.startswith(part + "."):
            return part
    return module.partition(".")[0]


def floor(module: str) -> int:
    part = unit(module)
    return ROOF if part in ON_THE_ROOF else FLOORS[part]


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement, in functions and under TYPE_CHECKING too, and of import calls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:  # `from mooncake_connector import cli` names a module as well
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and is_import_call(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    return ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])


def is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def modules() -> Iterator[tuple[str, Path]]:
    for package in FLOORS:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            yield ".".join(path.relative_to(REPOSITORY).with_suffix("").parts), path


def test_no_module_imports_upwards_or_sideways_or_an_engine():
    found = [line for module, path in modules() for line in violations(module, path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_the_rules_see_the_modules_of_every_package():
    seen = {module.partition(".")[0] for module, _ in modules()}
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"tests"}
    assert seen == packages and "mooncake_connector" in seen


@pytest.mark.parametrize(
    "module, source",
    [
        ("mooncake_connector.kv.keys", "import store_client"),
        ("mooncake_connector.kv.keys", "from store_client.base import Shard"),
        ("mooncake_connector.kv.keys", "from mooncake_connector.cli import main"),
        ("mooncake_connector.kv.keys", "from mooncake_connector import cli"),
        ("mooncake_connector.kv.keys", "from .. import cli"),
        ("mooncake_connector.kv.keys", "from ..cli.main import app"),
        ("mooncake_connector.kv.keys", "def later():\n    import vllm_plugin"),
        ("mooncake_connector.kv.keys", "import importlib\nimportlib.import_module('store_client')"),
        ("mooncake_connector.kv.page", "import torch"),
        ("mooncake_connector.cli.main", "import torch"),
        ("mooncake_connector.cli.main", "from vllm import LLM"),
        ("store_client.base", "from transfer.plan.pairing import Copy"),
        ("transfer.plan.pairing", "import numpy, store_client.base"),
        ("store_client.base", "from vllm_plugin import connector"),
        ("store_client.base", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("vllm_plugin.prefix.worker", "import sglang_backend"),
        ("sglang_backend.request_lines", "from vllm_plugin.prefix.kept import Keeper"),
        ("store_client.kept", "from vllm_plugin.prefix.tracked import Tracked"),
        ("vllm_plugin.prefix.worker", "import sglang.srt"),
        ("vllm_plugin.prefix.worker", "from mooncake_connector.cli.pool import open_pool"),
        ("vllm_plugin.prefix.worker", "from store_client import EmbeddedStore"),
        ("vllm_plugin.prefix.worker", "from store_client.embedded import folder"),
        ("sglang_backend.storage", "import store_client.embedded"),
        ("sglang_backend.storage", "__import__('vllm')"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    (line,) = violations(module, source)
    assert line.startswith(module)


@pytest.mark.parametrize(
    "module, source",
    [
        ("mooncake_connector.kv.keys", "import numpy\nfrom mooncake_connector.errors import ConfigError"),
        (
            "mooncake_connector.cli.store",
            "from store_client import EmbeddedStore\nfrom mooncake_connector import config",
        ),
        ("mooncake_connector.cli.main", "from mooncake_connector.cli.bench import app"),
        ("store_client.base", "from mooncake_connector.kv.namespace import Namespace\nfrom store_client import base"),
        ("store_client.embedded.store", "from .rows import Row\nfrom ..base import Store"),
        ("vllm_plugin.prefix.worker", "import torch, vllm.config\nfrom store_client.base import Shard"),
        ("sglang_backend.storage", "import sglang.srt, torch, transfer.plan.pairing"),
        ("vllm_plugin.prefix.worker", "from vllm_plugin.blocks import Blocks\nimport vllm_something_else"),
    ],
)
def test_an_allowed_import_is_not_found(module, source):
    assert violations(module, source) == []
