"""From settings to a tier: what is missing is said, with what to do about it."""

from importlib import import_module

import pytest

from mooncake_connector.config.tiers import KINDS, FolderTier, TierSettings
from store_client.tiers import open as opening
from store_client.tiers.base import TierError
from store_client.tiers.open import open_tier


def test_every_kind_of_the_configuration_can_be_opened():
    assert opening._KINDS.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_configuration_asks_for_a_secret_where_the_pages_of_a_kind_need_a_mac(kind):
    where = opening._KINDS[kind]
    assert getattr(import_module(where.module), where.tier).needs_mac == KINDS[kind].needs_secret


def test_a_package_that_is_missing_is_named_with_what_to_install(monkeypatch):
    missing = opening._Kind("store_client.tiers.no_such_module", "Nothing", "object")
    monkeypatch.setitem(opening._KINDS, "folder", missing)
    with pytest.raises(TierError, match=r"pip install 'mooncake-connector\[object\]'") as caught:
        open_tier(FolderTier(path="/nowhere", name="shelf"), b"")
    assert caught.value.lasting and "shelf (folder)" in str(caught.value)


def test_a_tier_that_others_may_write_to_needs_the_secret(monkeypatch):
    class Others:
        needs_mac = True

        def __init__(self, settings: TierSettings, pool_name: str) -> None:
            self.opened = (settings, pool_name)

    monkeypatch.setattr(opening, "Others", Others, raising=False)
    monkeypatch.setitem(opening._KINDS, "folder", opening._Kind("store_client.tiers.open", "Others"))
    settings = FolderTier(path="/nowhere")
    with pytest.raises(TierError, match="set `secret_file`") as caught:
        open_tier(settings, b"")
    assert caught.value.lasting and caught.value.cause == "denied"
    assert open_tier(settings, b"secret", "pool").opened == (settings, "pool")
