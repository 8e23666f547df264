"""What every form needs: commands as containers run them, without secrets, and YAML on which all readers agree."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from mooncake_connector import __version__
from mooncake_connector.config.sources import ENV_PREFIX, load_config
from mooncake_connector.deploy.commands import ANY, Command
from mooncake_connector.deploy.schema import Deployment, folder_of, is_folder
from mooncake_connector.sizes import parse_nbytes

HUB = "/hub"
"""Where containers have what is downloaded from the hub."""
_BASE_IMAGES = {"vllm": "vllm/vllm-openai:v{known}", "sglang": "lmsysorg/sglang:v{known}"}
_SECRET_NAME = re.compile(
    r"(?:(?:^|[_.-])(?:keys?|tokens?|pass|pwd)|(?:api|access|private)keys?"
    r"|secrets?|passwords?|passwd|passphrase|credentials?)[_-]?\d*$",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"tokens$", re.IGNORECASE)
"""Such a name may also count tokens."""
_NUMBER = re.compile(r"-?\d[\d_.]*[kmgt]?i?|auto|none|null", re.IGNORECASE)
_OF_ALL = "secret"
"""What the secret that instances share is called in a Secret."""
_PLAIN = re.compile(r"-{0,2}[A-Za-z/][\w./:@,=-]*[\w/]")
_DEFAULT_CAPACITY, _ROOM_NBYTES = "4GiB", 2 << 30
"""Of shared memory: for a pool whose capacity is not said, and for what an engine itself puts there."""


@dataclass(frozen=True, slots=True)
class Contained:
    """A process in a container. Where a value is a secret, `$NAME` in what `refer` makes of it stands for it."""

    command: Command
    arguments: list[str]
    env: dict[str, str]
    secrets: dict[str, str]
    """Its variables whose values are not in the file, and by what name of `Secrets` each is given."""


class Secrets:
    """Values that are not in the file, those of all processes: by one name where they are the same."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def name_of(self, value: str, name: str, role: str, taken: Container[str] = ()) -> str:
        """`name`, or one with the role where that stands for another value."""
        own = f"{name}_{role.upper()}"
        names = itertools.chain((name, own), (f"{own}_{count}" for count in itertools.count(2)))
        free = (one for one in names if one != _OF_ALL and one not in taken)
        return next(one for one in free if self.values.setdefault(one, value) == value)


def contained(
    command: Command, refer: Callable[[str], str], more: Mapping[str, str], all_secrets: Secrets
) -> Contained:
    """`refer` writes a reference to a variable; both forms expand `$`, so any other is doubled. `more` wins."""
    program, *words = command.arguments
    arguments = ["python3" if program == sys.executable else Path(program).name]
    secrets = {
        name: all_secrets.name_of(value, name, command.role)
        for name, value in command.env.items()
        if _is_secret(name, value)
    }
    env = {name: escaped(value) for name, value in {**command.env, **more}.items() if name not in secrets}
    taken = {name for name in command.env if secrets.get(name) != name}
    flag = ""
    for word in words:
        before = ""
        if re.match("--|-[A-Za-z]", word):
            flag, equals, _ = word.partition("=")
            before = f"{flag}{equals}"
        value = word.removeprefix(before)
        if before == word or not _is_secret(flag, value):
            arguments.append(escaped(word))
        else:
            variable = re.sub(r"\W", "_", flag.strip("-")).upper()
            name = all_secrets.name_of(value, variable, command.role, taken)
            secrets[name] = name
            arguments.append(before + refer(name))
    return Contained(command, arguments, env, secrets)


def _is_secret(name: str, value: str) -> bool:
    """None of our own is one: they name files. One that is empty has nothing to hide."""
    is_number = _NUMBERED.search(name) and _NUMBER.fullmatch(value)
    return bool(value and _SECRET_NAME.search(name) and not is_number) and not name.startswith(ENV_PREFIX)


def escaped(text: str) -> str:
    return text.replace("$", "$$")


def inside(deployment: Deployment) -> Deployment:
    """As containers run it: listening everywhere, with a pool whose size does not hang on what is free at the start."""
    dropped = ("transfer_hosts", "secret_file")
    connector = {key: value for key, value in deployment.connector.items() if key not in dropped}
    if connector.get("prefix_reuse", True) and connector.get("capacity") is None:
        connector["capacity"] = _DEFAULT_CAPACITY
    router = msgspec.structs.replace(deployment.router, host=_everywhere(deployment.router.host))
    return msgspec.structs.replace(deployment, host=_everywhere(deployment.host), router=router, connector=connector)


def _everywhere(host: str) -> str:
    return next(any_ for any_, home in ANY.items() if (":" in any_) == (":" in host))


def image_of(deployment: Deployment) -> str:
    return deployment.render.image or f"mooncake-connector-{deployment.engine}:{__version__}"


def shared_memory_mib(env: Mapping[str, str], instances: int) -> int:
    """Of /dev/shm, for so many instances that share the pool which the environment of one says."""
    config = load_config(None, env)
    pool_nbytes = (config.capacity or parse_nbytes(_DEFAULT_CAPACITY)) if config.prefix_reuse else 0
    return math.ceil((pool_nbytes * 1.02 + _ROOM_NBYTES * instances) / (1 << 20))


def model_folder(deployment: Deployment, file: Path) -> str | None:
    """None where the model is a name on the hub."""
    return str(folder_of(deployment.model, file)) if is_folder(deployment.model) else None


def how_to_build(deployment: Deployment, known: str) -> list[str]:
    base = _BASE_IMAGES[deployment.engine].format(known=known)
    wheel = f"mooncake_connector-{__version__}-py3-none-any.whl"
    router = "" if deployment.router.kind in ("builtin", "none") else f" {deployment.router.kind}"
    return [
        f"The image, {image_of(deployment)}, is one of the engine with mooncake-connector in it. For NVIDIA GPUs:",
        f"    FROM {base}",
        f"    COPY {wheel} /tmp/",
        f"    RUN pip install /tmp/{wheel}{router}",
    ]


def comment(lines: list[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that some reader of YAML may take for something else, such as 1e3 or 08 or y."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else "'")


_Dumper.add_representer(str, _text)


def dumped(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
