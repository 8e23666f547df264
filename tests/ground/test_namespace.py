"""A namespace separates everything whose bytes mean something else, and nothing more."""

import dataclasses
import hashlib
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mooncake_connector.errors import NamespaceError
from mooncake_connector.kv.namespace import Namespace, canonical_json, private_model_digest

BASE = Namespace(
    model_name="org/model",
    model_digest="ab" * 32,
    kv_dtype="bfloat16",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    page_tokens=64,
)
DISPLAY = {"model_name"}
IDENTITY = sorted({field.name for field in dataclasses.fields(Namespace)} - DISPLAY)
COUNTS = {"num_layers", "num_kv_heads", "head_dim", "page_tokens", "format_version"}
OPTIONAL_COUNTS = {"kv_lora_rank", "rope_dim"}
REQUIRED_TEXTS = {"model_digest", "kv_dtype"}

counts = st.integers(1, 2**40)


def value_of(name: str) -> st.SearchStrategy:
    if name in COUNTS:
        return counts
    if name in OPTIONAL_COUNTS:
        return st.one_of(st.none(), counts)
    if name == "group":
        return st.one_of(st.just(""), st.dictionaries(st.text(), counts, min_size=1).map(canonical_json))
    return st.text(min_size=1 if name in REQUIRED_TEXTS else 0)


namespaces = st.builds(Namespace, **{name: value_of(name) for name in [*IDENTITY, *DISPLAY]})


@given(namespaces, st.sampled_from(IDENTITY), st.data())
def test_namespaces_differ_when_any_field_that_is_not_for_display_does(namespace, name, data):
    other = data.draw(value_of(name))
    assume(other != getattr(namespace, name))
    assert dataclasses.replace(namespace, **{name: other}).digest != namespace.digest


@given(namespaces, st.text())
def test_a_name_for_display_does_not_separate(namespace, name):
    assert dataclasses.replace(namespace, model_name=name).digest == namespace.digest


def test_the_digest_is_sha256_of_canonical_json_and_stays_what_it_was():
    assert not BASE.group, "a model with one group is named as if there were no groups"
    identity = {name: getattr(BASE, name) for name in IDENTITY if name != "group"}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    assert BASE.digest == hashlib.sha256(text.encode()).digest()
    assert BASE.digest.hex() == "4f52f2443003d51e13e8c280bf7b4475c4b402ad0eb3a6c6b6cd8288e483db19"


@given(namespaces)
def test_a_namespace_survives_json(namespace):
    assert Namespace.from_dict(json.loads(json.dumps(namespace.to_dict()))) == namespace


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_a_count_must_be_a_positive_integer(name, value):
    with pytest.raises(NamespaceError, match=f"{name} is {value!r}"):
        dataclasses.replace(BASE, **{name: value})


@pytest.mark.parametrize("name", sorted(REQUIRED_TEXTS))
def test_a_field_that_separates_models_must_not_be_empty(name):
    with pytest.raises(NamespaceError, match=f"{name} is empty"):
        dataclasses.replace(BASE, **{name: ""})


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("sliding_window", 128, "sliding_window"),
        ("kv_dtype", 1, "kv_dtype is 1"),
        ("rope", None, "rope is None"),
        ("num_layers", "30", "num_layers is '30'"),
        ("rope_dim", "64", "rope_dim is '64'"),
    ],
)
def test_a_dict_with_an_unknown_or_missing_field_or_a_wrong_type_is_refused(name, value, told):
    with pytest.raises(NamespaceError, match=told):
        Namespace.from_dict({**BASE.to_dict(), name: value})
    values = BASE.to_dict()
    values.pop("kv_dtype")
    with pytest.raises(NamespaceError, match="kv_dtype"):
        Namespace.from_dict(values)


def test_a_private_namespace_is_told_by_its_digest_and_is_another_one_each_time():
    digests = {private_model_digest() for _ in range(10)}
    assert len(digests) == 10
    assert all(dataclasses.replace(BASE, model_digest=digest).is_private for digest in digests)
    for shared in (BASE.model_digest, "private-model", f"my-{min(digests)}", f"{min(digests)}-2"):
        assert not dataclasses.replace(BASE, model_digest=shared).is_private


def test_mla_is_told_by_its_latent_rank():
    assert not BASE.is_mla
    assert dataclasses.replace(BASE, num_kv_heads=1, head_dim=576, kv_lora_rank=512, rope_dim=64).is_mla


def test_canonical_json_ignores_the_order_of_keys():
    assert canonical_json({"b": 1, "a": {"d": 2.5, "c": "ü"}}) == r'{"a":{"c":"\u00fc","d":2.5},"b":1}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_refuses_what_json_does_not_have(value):
    with pytest.raises(ValueError):
        canonical_json(value)
