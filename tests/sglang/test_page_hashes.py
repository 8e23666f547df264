"""SGLang's own loader of its code for page hashes, with a compiler that takes its time and compiles something small."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from instances import storage_config
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.utils import get_storage_hash_str
from simulated.waiting import wait_for
from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER

from sglang_backend.hicache import MooncakeConnectorStorage
from sglang_backend.page_hashes import compile_early

COMPILER = """#!/bin/sh
case "$*" in *hash_binding.cpp*)
    echo asked >> {folder}/asked
    until [ -e {folder}/go ]; do sleep 0.01; done
    [ -s {folder}/go ] && exit 1
    for one; do
        shift
        case "$one" in *hash_binding.cpp) one={folder}/small.cpp;; esac
        set -- "$@" "$one"
    done;;
esac
exec c++ "$@"
"""
SMALL = """
#include <Python.h>
static PyObject *get_hash(PyObject *, PyObject *) { return PyUnicode_FromString("compiled"); }
static PyMethodDef methods[] = {{"get_hash", get_hash, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_hicache_hash_cpp() { return PyModule_Create(&module); }
"""


class Compiler:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "g++"
        (folder / "small.cpp").write_text(SMALL)
        self.path.write_text(COMPILER.format(folder=folder))
        self.path.chmod(0o700)

    @property
    def asked(self) -> int:
        asked = self.folder / "asked"
        return asked.read_text().count("asked") if asked.exists() else 0

    def go_on(self, *, fails: bool = False) -> None:
        (self.folder / "go").write_text("and fail" if fails else "")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """This process, as it is before it hashes a page, on a machine where none was ever hashed."""
    if compile_early.cache_info().currsize:
        compile_early().result(60)  # for another test
    compile_early.cache_clear()
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(JIT_EXTENSION_VERSIONER, "entries", {})
    unloaded = lru_cache(maxsize=1)(native_hash._load_native_hash_module.__wrapped__)
    monkeypatch.setattr(native_hash, "_load_native_hash_module", unloaded)
    yield made
    made.go_on()
    compile_early().result(60)
    compile_early.cache_clear()


def backend() -> MooncakeConnectorStorage:
    return MooncakeConnectorStorage(storage_config(), None)


def in_thread(hashed: list[Any]) -> threading.Thread:
    """A lookup's, as SGLang's thread makes it."""
    thread = threading.Thread(target=lambda: hashed.append(get_storage_hash_str([1, 2])))
    thread.start()
    return thread


def test_it_is_compiled_as_soon_as_there_is_a_backend_and_waited_for_by_nobody(compiler: Compiler) -> None:
    backend()
    backend()  # attached again, say
    wait_for(lambda: compiler.asked == 1)
    assert not compile_early().done()
    compiler.go_on()
    compile_early().result(60)
    assert get_storage_hash_str([1, 2]) == "compiled"
    assert compiler.asked == 1


def test_a_lookup_meanwhile_takes_what_is_being_compiled(compiler: Compiler) -> None:
    backend()
    wait_for(lambda: compiler.asked == 1)
    lookup = in_thread(hashed := [])
    compiler.go_on()
    lookup.join(60)
    assert hashed == ["compiled"] and compiler.asked == 1


def test_where_it_fails_a_line_says_so_and_sglang_tries_again(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.go_on(fails=True)
    for _ in range(2):
        backend()
        compile_early().result(60)
    (line,) = [record.message for record in caplog.records if "mooncake_connector" in record.name]
    assert "cannot be compiled yet" in line and "Error building extension 'hicache_hash_cpp'" in line
    compiler.go_on()
    assert get_storage_hash_str([1, 2]) == "compiled"
    assert compiler.asked == 2


def test_what_is_loaded_already_is_left_alone(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    compiler.go_on()
    assert get_storage_hash_str([1, 2]) == "compiled"
    caplog.clear()
    backend()
    compile_early().result(60)
    assert compiler.asked == 1 and not caplog.records


def test_a_version_without_such_code_is_left_alone(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, native_hash.__name__, None)
    backend()
    compile_early().result(60)
    assert not compiler.asked and not caplog.records
