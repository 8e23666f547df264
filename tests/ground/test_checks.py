"""The checks that `doctor` makes of any engine."""

from __future__ import annotations

import abc
import importlib
import sys
from types import SimpleNamespace

import pytest

from mooncake_connector import checks
from mooncake_connector.checks import Verdict

GROUP, NAME, VALUE = "some.group", "mooncake_connector", "some_plugin:register"


class TestImportAndVersion:
    @pytest.mark.parametrize("missing", ["no_such_engine", "no_such_library"])
    def test_an_engine_that_is_missing_or_lacks_something_is_told_with_the_environment(self, missing):
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module(missing)
        check = checks.not_imported("Engine", "no_such_engine", caught.value)
        assert check.status is Verdict.FAILED
        if missing == "no_such_engine":
            assert check.detail.startswith(f"not installed in {sys.prefix};")
        else:
            assert missing in check.detail and "not installed" not in check.detail

    @pytest.mark.parametrize(
        "seen, status", [("1.2.3", Verdict.OK), ("1.2.3+cpu", Verdict.OK), ("1.2.30", Verdict.WARNING)]
    )
    def test_another_version_is_a_warning_that_names_both(self, seen, status):
        check = checks.version("Engine", seen, "1.2.3")
        assert check.status is status and seen in check.detail and "1.2.3" in check.detail

    def test_what_is_tested_of_a_version_is_said_of_that_one_alone(self):
        partly = {"1.3.0": "of 1.3.0 its interface"}
        assert "of 1.3.0 its interface" in checks.version("Engine", "1.3.0+cpu", "1.2.3", partly).detail
        assert "its interface" not in checks.version("Engine", "1.4.0", "1.2.3", partly).detail


class TestEntryPoint:
    @pytest.fixture
    def declare(self, monkeypatch):
        def declare(*values: str, loads: bool = True) -> None:
            def load() -> None:
                if not loads:
                    raise ImportError("some library is missing")

            points = [SimpleNamespace(name=NAME, value=value, load=load) for value in values]
            points.append(SimpleNamespace(name="another", value="elsewhere:register"))
            monkeypatch.setattr(checks, "entry_points", lambda group: points if group == GROUP else [])

        return declare

    def look(self, chosen=None):
        return checks.entry_point(GROUP, NAME, VALUE, chosen, "ENGINE_PLUGINS")

    def test_the_declared_one_is_fine(self, declare):
        declare(VALUE)
        assert self.look().status is Verdict.OK
        assert self.look(["another", NAME]).status is Verdict.OK

    @pytest.mark.parametrize(
        "values, chosen, loads, told",
        [
            ((), None, True, f"{GROUP} has no '{NAME}'"),
            (("old_package:register",), None, True, f"is old_package:register, not {VALUE}"),
            ((VALUE, "old_package:register"), None, True, f"is old_package:register, not {VALUE}"),
            ((VALUE,), ["another"], True, "ENGINE_PLUGINS leaves it out (another)"),
            ((VALUE,), [], True, "ENGINE_PLUGINS leaves it out"),
            ((VALUE,), None, False, "ImportError: some library is missing"),
        ],
    )
    def test_whatever_keeps_the_engine_from_loading_it_is_told(self, declare, values, chosen, loads, told):
        declare(*values, loads=loads)
        check = self.look(chosen)
        assert check.status is Verdict.FAILED and told in check.detail


class Base(abc.ABC):
    @abc.abstractmethod
    def load(self, keys, slots): ...

    def save(self, keys):
        raise NotImplementedError

    @classmethod
    def build(cls, config):
        raise NotImplementedError

    @property
    def ready(self):
        raise NotImplementedError


class Fits(Base):
    def load(self, keys, slots): ...

    @classmethod
    def build(cls, config): ...

    @property
    def ready(self): ...

    def _own(self): ...


class Abstract(Base):
    def save(self, keys): ...


class OtherParameters(Fits):
    def save(self, keys, slots): ...


class OtherClassMethod(Fits):
    @classmethod
    def build(cls, config, role): ...


class Unknown(Fits):
    def save_all(self): ...


class TestInterface:
    def test_a_class_that_fits_is_fine(self):
        check = checks.interface("connector", Fits)
        assert (check.name, check.status) == ("connector", Verdict.OK) and check.detail.endswith(".Fits")

    @pytest.mark.parametrize(
        "ours, told",
        [
            (Abstract, "load is missing"),
            (OtherParameters, "save takes (self, keys), not (self, keys, slots)"),
            (OtherClassMethod, "build takes (cls, config), not (cls, config, role)"),
            (Unknown, "save_all is nothing that the engine knows"),
        ],
    )
    def test_one_that_does_not_is_told_with_the_method(self, ours, told):
        check = checks.interface("connector", ours)
        assert check.status is Verdict.FAILED and told in check.detail and ours.__name__ in check.detail

    def test_what_is_ours_alone_may_be_named(self):
        assert checks.interface("connector", Unknown, beside=["save_all"]).status is Verdict.OK
