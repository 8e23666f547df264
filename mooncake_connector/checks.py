"""What `mooncake-connector doctor` finds out: a check and its outcome, and checks that concern every engine alike.

Imports no engine: an adapter's `doctor` module does, and hands classes in.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import MappingProxyType


class Verdict(str, enum.Enum):
    """`WARNING`: it will work, but not as one may expect. `FAILED`: it will not."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `detail` says what was seen and, unless it is fine, what to do."""

    name: str
    status: Verdict
    detail: str


def ok(name: str, detail: str) -> Check:
    return Check(name, Verdict.OK, detail)


def warning(name: str, detail: str) -> Check:
    return Check(name, Verdict.WARNING, detail)


def failed(name: str, detail: str) -> Check:
    return Check(name, Verdict.FAILED, detail)


def not_imported(engine: str, module: str, error: Exception) -> Check:
    """The outcome where `import <module>` raised `error`."""
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return failed(
            engine,
            f"not installed in {sys.prefix}; install mooncake-connector where {engine} is, and run the doctor there",
        )
    return failed(engine, f"cannot be imported in {sys.prefix}: {type(error).__name__}: {error}")


def version(engine: str, seen: str, known: str, partly: Mapping[str, str] = MappingProxyType({})) -> Check:
    """Whether the engine is of the version that this package is tested with; "+cpu" and the like do not matter.

    Args:
        partly: what is tested of other versions.
    """
    number = seen.partition("+")[0]
    if number == known:
        return ok(engine, f"{seen} in {sys.prefix}")
    tested = known if number not in partly else f"{known}, and {partly[number]}"
    return warning(engine, f"{seen} in {sys.prefix}; mooncake-connector is tested with {tested}")


def entry_point(group: str, name: str, value: str, chosen: Collection[str] | None, variable: str) -> Check:
    """Whether an engine that loads the plugins of `group` loads ours.

    Args:
        value: what the entry point must be, "package:function".
        chosen: names that the environment variable `variable` restricts plugins to; None for all.
    """
    what = "plugin"
    found = [point for point in entry_points(group=group) if point.name == name]
    others = sorted({point.value for point in found} - {value})
    if others:
        return failed(
            what, f"{name!r} in {group} is {', '.join(others)}, not {value}: uninstall the package that has it"
        )
    if not found:
        return failed(what, f"{group} has no {name!r}: install mooncake-connector with pip, not by copying its folders")
    if chosen is not None and name not in chosen:
        return failed(what, f"{variable} leaves it out ({','.join(chosen)}): add {name}, or unset it")
    try:
        found[0].load()
    except Exception as error:
        return failed(what, f"{value} cannot be loaded: {type(error).__name__}: {error}")
    return ok(what, f"{group}: {name} = {value}")


def interface(name: str, ours: type, *, beside: Collection[str] = ()) -> Check:
    """Whether the methods of our class are those that the engine's base class declares, with the same parameters.

    Args:
        beside: public names of ours that the base class need not have.
    """
    wrong = [f"{method} is missing" for method in sorted(getattr(ours, "__abstractmethods__", ()))]
    for method, value in vars(ours).items():
        theirs = next((vars(base)[method] for base in ours.__mro__[1:] if method in vars(base)), None)
        if method.startswith("_") or method in beside:
            continue
        if theirs is None:
            wrong.append(f"{method} is nothing that the engine knows")
        elif (seen := _parameters(theirs)) != (known := _parameters(value)):
            wrong.append(f"{method} takes ({', '.join(seen)}), not ({', '.join(known)})")
    if wrong:
        return failed(name, f"{ours.__name__} does not fit this version of the engine: {'; '.join(wrong)}")
    return ok(name, f"{ours.__module__}.{ours.__name__}")


def _parameters(member: object) -> list[str]:
    function = getattr(member, "__func__", member)  # of a class method or static method
    return list(inspect.signature(function).parameters) if callable(function) else []
