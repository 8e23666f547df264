"""Bytes of a snapshot that are not what was written: understood, or refused with a word; never a wrong page."""

from __future__ import annotations

import hashlib
import os
import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples
from store.pools import CAPACITY, garble
from store.snapshots import SPACES, held_by, put_some

from mooncake_connector.errors import SnapshotError
from store_client import EmbeddedStore
from store_client.embedded.survey import PAGE
from store_client.snapshot import Snapshot, form, restore, take_snapshot
from store_client.snapshot.form import ENTRY, NO_PARENT, Manifest
from store_client.snapshot.order import returning_order, times_of_use
from store_client.testing import chain

PAGES = 36
WHERE = form.Path("/a/snapshot")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snapshots") / "original"
    with EmbeddedStore(tmp_path_factory.mktemp("pools") / "pool", CAPACITY) as store:
        put_some(store, chains=2, length=6)
        take_snapshot(store, folder)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One pool for many restores; cleared before each."""
    with EmbeddedStore(tmp_path_factory.mktemp("pools") / "shared", CAPACITY) as store:
        yield store


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "snapshot")


def rewrite(folder, change):
    """The manifest with other values, and what proves it."""
    with Snapshot(folder) as snapshot:
        manifest = snapshot.manifest
    (folder / "manifest.json").write_bytes(form.encode_manifest(change(manifest)))


def write_index(folder, entries):
    (folder / "index").write_bytes(entries.tobytes())
    digest = hashlib.sha256(entries.tobytes()).hexdigest()
    rewrite_unread(folder, lambda manifest: msgspec.structs.replace(manifest, index_sha256=digest, pages=len(entries)))


def rewrite_unread(folder, change):
    manifest = form.parse_manifest((folder / "manifest.json").read_bytes(), folder)
    (folder / "manifest.json").write_bytes(form.encode_manifest(change(manifest)))


def back(folder, store):
    store.clear()
    with Snapshot(folder) as snapshot:
        return restore(snapshot, store)


class TestPages:
    def test_a_damaged_page_is_left_out_and_its_chain_comes_back(self, folder, shared):
        with Snapshot(folder) as snapshot:
            entries = snapshot.entries
            number = next(i for i, entry in enumerate(entries) if i in entries["parent"])
            at, space = int(entries[number]["offset"]), snapshot.spaces[int(entries[number]["space"])]
            key = bytes(entries[number]["key"])
        garble(folder / "pages.00000", at + 100, bytes([(folder / "pages.00000").read_bytes()[at + 100] ^ 1]))
        report = back(folder, shared)
        assert (report.pages, report.damaged_pages) == (PAGES - 1, 1)
        assert space is not None
        assert (space[0].digest, space[1], key) not in held_by(shared) and len(held_by(shared)) == PAGES - 1

    def test_a_file_that_shrinks_meanwhile_costs_its_pages(self, folder, shared):
        shared.clear()
        with Snapshot(folder) as snapshot:
            os.truncate(folder / "pages.00000", 30_000)
            report = restore(snapshot, shared)
        assert report.pages + report.damaged_pages == PAGES and report.damaged_pages > 0 < report.pages
        assert len(held_by(shared)) == report.pages

    def test_pages_of_a_namespace_with_a_field_of_a_later_version_are_left_out(self, folder, shared):
        def later(manifest: Manifest) -> Manifest:
            first, *others = manifest.spaces
            changed = msgspec.structs.replace(first, namespace={**first.namespace, "spin": 1})
            return msgspec.structs.replace(manifest, spaces=[changed, *others])

        rewrite(folder, later)
        report = back(folder, shared)
        assert (report.pages, report.unknown_pages) == (PAGES - 12, 12)


class TestIndexAndManifest:
    @pytest.mark.parametrize("name", ["manifest.json", "index", "pages.00000"])
    @pytest.mark.parametrize("how", ["gone", "cut", "longer", "pipe"])
    def test_a_file_that_is_not_what_it_was_is_refused(self, folder, shared, name, how):
        file = folder / name
        content = file.read_bytes()
        file.unlink()
        if how == "pipe":
            os.mkfifo(file)
        elif how != "gone":
            file.write_bytes(content[:-1] if how == "cut" else content + b"}")
        with pytest.raises(
            SnapshotError, match=r"is damaged \(.*delete it|is not a snapshot of a pool that can be read"
        ):
            back(folder, shared)
        assert held_by(shared) == {}

    def test_one_wrong_bit_of_the_index_is_refused(self, folder):
        garble(folder / "index", 500, bytes([(folder / "index").read_bytes()[500] ^ 4]))
        with pytest.raises(SnapshotError, match="index does not match its SHA-256"):
            Snapshot(folder)

    @pytest.mark.parametrize("written, expected", [(0, "has format 0"), (2, "has format 2"), (10**30, "has format 10")])
    def test_another_format_is_refused_with_what_to_do(self, folder, written, expected):
        raw = (folder / "manifest.json").read_bytes()
        (folder / "manifest.json").write_bytes(raw.replace(b'"format":1', b'"format":%d' % written))
        with pytest.raises(SnapshotError, match=expected) as caught:
            Snapshot(folder)
        assert "delete it" in str(caught.value)

    @pytest.mark.parametrize(
        "change",
        [
            {"pages": 1 << 27},
            {"pages": (1 << 27) + 1},
            {"files": [1 << 61]},
            {"files": []},
            {"spaces": []},
            {"taken": -1.0},
            {"index_sha256": ""},
        ],
        ids=str,
    )
    def test_numbers_that_do_not_fit_are_refused_before_memory_is_taken(self, folder, change):
        rewrite(folder, lambda manifest: msgspec.structs.replace(manifest, **change))
        with pytest.raises(SnapshotError, match="damaged"):
            Snapshot(folder)

    @pytest.mark.parametrize(
        "field, value",
        [
            ("offset", 1 << 63),
            ("offset", (1 << 64) - 1),
            ("nbytes", 0),
            ("nbytes", 0xFFFFFFFF),
            ("file", 1),
            ("file", 0xFFFFFFFF),
            ("space", 3),
            ("space", 0xFFFFFFFF),
            ("parent", 5),
            ("parent", 0xFFFFFFFE),
        ],
    )
    def test_an_entry_that_leads_nowhere_is_refused_although_it_is_proven(self, folder, field, value):
        with Snapshot(folder) as snapshot:
            entries = snapshot.entries.copy()
        entries[field][5] = value
        write_index(folder, entries)
        with pytest.raises(SnapshotError, match="damaged"):
            Snapshot(folder)

    def test_a_parent_in_another_space_is_refused(self, folder):
        with Snapshot(folder) as snapshot:
            entries = snapshot.entries.copy()
        other = int(np.flatnonzero(entries["space"] != entries["space"][0])[0])
        entries["parent"][other] = 0
        write_index(folder, entries)
        with pytest.raises(SnapshotError, match="into another namespace"):
            Snapshot(folder)


@settings(max_examples=examples(150))
@given(st.binary(max_size=400))
def test_any_bytes_are_a_manifest_or_an_error(raw):
    with pytest.raises(SnapshotError):
        form.parse_manifest(raw, WHERE)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["package", "taken", "capacity_nbytes", "spaces", "pages", "files", "index_sha256", "further"]
SPACE_FIELDS = ["namespace", "shard", "pages", "nbytes", "further"]


@settings(max_examples=examples(150))
@given(st.data())
def test_any_values_in_a_proven_manifest_are_understood_or_an_error(original, data):
    manifest = msgspec.json.decode((original / "manifest.json").read_bytes())
    inner = manifest["manifest"]
    if data.draw(st.booleans()):
        inner[data.draw(st.sampled_from(FIELDS))] = data.draw(VALUES)
    else:
        inner["spaces"][0][data.draw(st.sampled_from(SPACE_FIELDS))] = data.draw(VALUES)
    raw = msgspec.json.encode(inner)
    manifest["sha256"] = hashlib.sha256(raw).hexdigest()
    manifest["manifest"] = msgspec.Raw(raw)
    try:
        parsed = form.parse_manifest(msgspec.json.encode(manifest), WHERE)
        assert all(space.name() is None or isinstance(space.name(), tuple) for space in parsed.spaces)
        entries = np.fromfile(original / "index", dtype=ENTRY)
        form.check_entries(entries, parsed, WHERE)
    except SnapshotError as error:
        assert "damaged" in str(error)


def test_deep_nesting_is_an_error():
    deep = b"[" * 100_000 + b"]" * 100_000
    for raw in (deep, b'{"kind":"x","format":1,"manifest":' + deep + b"}"):
        with pytest.raises(SnapshotError):
            form.parse_manifest(raw, WHERE)


@settings(max_examples=examples(200))
@given(st.data())
def test_any_entries_are_within_their_files_or_an_error(original, data):
    """And what is understood can be read and restored without a fault."""
    manifest = form.parse_manifest((original / "manifest.json").read_bytes(), WHERE)
    entries = np.fromfile(original / "index", dtype=ENTRY)
    for _ in range(data.draw(st.integers(1, 3))):
        field = data.draw(st.sampled_from(["idle_ns", "offset", "nbytes", "file", "space", "parent"]))
        limit = int(np.iinfo(ENTRY[field]).max)
        values = st.integers(0, 70_000) | st.integers(limit - 10, limit) | st.integers(0, limit)
        entries[field][data.draw(st.integers(0, PAGES - 1))] = data.draw(values)
    try:
        form.check_entries(entries, manifest, WHERE)
    except SnapshotError:
        return
    size = manifest.files[0]
    assert all(0 < int(entry["nbytes"]) <= size - int(entry["offset"]) for entry in entries)
    assert all(entry["parent"] == NO_PARENT or entry["parent"] < i for i, entry in enumerate(entries))
    assert len(times_of_use(entries["idle_ns"], 10**9, 10**12)) == PAGES


@settings(max_examples=40)
@given(st.data())
def test_a_change_anywhere_gives_no_wrong_page(original, shared, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("changed") / "snapshot"
    shutil.copytree(original, folder)
    name = data.draw(st.sampled_from(["manifest.json", "index", "pages.00000"]))
    content = bytearray((folder / name).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.integers(1, 64))
    content[at : at + length] = data.draw(st.binary(min_size=1, max_size=length))
    (folder / name).write_bytes(content)
    try:
        report = back(folder, shared)
    except SnapshotError:
        shared.clear()
        report = None
    held = held_by(shared)  # compares the bytes of every page
    assert len(held) == (report.pages if report else 0)
    assert report is None or report.pages + report.damaged_pages + report.unknown_pages == PAGES


PAGE_OF_A_POOL = st.tuples(
    st.integers(-1, 19), st.integers(0, 2), st.integers(0, 5) | st.integers(0, (1 << 64) - 1),
    st.sampled_from([1, 4096, 100 << 20]),
)  # fmt: skip


@settings(max_examples=examples(200))
@given(st.lists(PAGE_OF_A_POOL, min_size=1, max_size=20))
def test_pages_return_behind_their_parents_and_by_use(drawn):
    count = len(drawn)
    pages = np.zeros(count, dtype=PAGE)
    for i, (parent, space, idle_ns, nbytes) in enumerate(drawn):
        has_one = 0 <= parent < i
        pages["parent"][i] = parent if has_one else -1
        pages["depth"][i] = pages["depth"][parent] + 1 if has_one else 0
        pages["space"][i] = pages["space"][parent] if has_one else space
        pages["idle_ns"][i], pages["nbytes"][i] = idle_ns, nbytes
    order = returning_order(pages).tolist()
    assert sorted(order) == list(range(count))
    place = {page: at for at, page in enumerate(order)}
    assert all(pages["parent"][i] < 0 or place[int(pages["parent"][i])] < place[i] for i in range(count))
    if pages["nbytes"].sum() < 128 << 20 and len(set(pages["space"].tolist())) == 1:
        used = [min(int(pages["idle_ns"][j]) for j in [i, *_descendants(pages, i)]) for i in order]
        assert used == sorted(used)


def _descendants(pages, i):
    children = [int(child) for child in np.flatnonzero(pages["parent"] == i)]
    return children + [page for child in children for page in _descendants(pages, child)]


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(0, 100) | st.integers(0, (1 << 64) - 1), min_size=1, max_size=50),
    st.integers(0, 1 << 62),
    st.integers(10_000, 1 << 60),
)
def test_times_of_use_keep_their_order_on_any_clock(idle, elapsed_ns, now_ns):
    used = times_of_use(np.array(idle, dtype=np.uint64), elapsed_ns, now_ns).tolist()
    assert all(0 < one <= now_ns for one in used)
    for this, when in zip(idle, used, strict=True):
        assert all((this > other) == (when < other_when) for other, other_when in zip(idle, used, strict=True))


def test_the_spaces_of_the_tests_are_all_saved(original):
    with Snapshot(original) as snapshot:
        assert len(snapshot.spaces) == len(SPACES) and len(chain("0", 6)) * 2 * len(SPACES) == PAGES
