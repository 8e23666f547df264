"""The figures of the tiers come out, whatever they are here."""

import shutil

import pytest

from bench.tiers import disk, folder
from bench.tiers.measure import Rates, Scale

TINY = Scale(nbytes=4 << 20, rounds=1, pages=(1 << 20,))


def rows_of(measured: list[Rates], title: str) -> None:
    assert [rates.what for rates in measured] == [f"{title}, {what}, pages of 1024 KiB" for what in ("write", "read")]
    for rates in measured:
        assert min(*rates.ours, *rates.other) > 0 and rates.ratio == rates.ours[0] / rates.other[0]
        assert rates.what in str(rates)


@pytest.mark.skipif(not shutil.which("fio"), reason="NOT TESTED: needs fio")
def test_a_disk_beside_fio(tmp_path):
    rows_of(disk.measure(tmp_path, TINY), "disk")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_beside_plain_files(tmp_path):
    rows_of(folder.measure(tmp_path, TINY), "folder")
    assert list(tmp_path.iterdir()) == []


def test_the_ratio_is_that_of_the_rounds():
    """A round in which everything was slow changes nothing."""
    rates = Rates("x", ours=(4.0, 1.0, 8.0), other=(5.0, 1.25, 4.0))
    assert rates.ratio == 0.8
