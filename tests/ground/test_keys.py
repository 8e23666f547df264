"""Page keys are SGLang's chain, byte for byte, and say exactly which tokens precede a page."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_connector.kv.keys import adapter_root_digest, content_tokens, page_keys, root_digest

P = 64
COUNT_UP = list(range(128))

# Printed by `get_hash` of SGLang 0.5.23 (mem_cache/cpp_utils/hash_binding.cpp, compiled) with page_size 64.
SGLANG_CHAINS = {
    "counting up": (
        COUNT_UP,
        "fea7b32778ecbdd7adee1941e98c89cf96bbc762f5f1beb0be24e36a456fbbc5",
        "1617a7384eff5e9135098c24794739af884859cdb17c1a61a834e8d6ac997351",
    ),
    "repeated text": (
        [1, 15043, 3186, 29892] * 32,
        "c94c23ec72ba4ec02459dc3d8af33323c925c1526500711b04f85621502a2bdb",
        "2f798b154f9db1f3051a6b6ec7feab08c86c670446262651841eff0142d3a3ac",
    ),
    "narrow pages around wide ones": (
        [*range(1000, 1064), *[2**32 - 1] * 64, 7, 2**32, *[1] * 62, *[2**63 - 1] * 64, *range(64)],
        "5202e60f6130ac4d1a719da4699af7be8be6db2720efe114f00388ae4df4ba1f",
        "4089fefef982ff4d987e1c7206f8c287797f4cfe89f506b26c580138d62debd7",
        "7502655b2b875ae4223cb45f74651558770d2e9b6950f1951a8950674816b2c7",
        "681989448f605f24d91a87e48d5880a7808d6109c2bfcec6838e8ad366d60cbd",
        "f8e67bdb0978fce1c8e03fc92d9d6433053b23bd766017a8f621c0ddb8103bab",
    ),
}
# The same program on COUNT_UP, after `storage_namespace_seed(extra_key, cache_salt)`: the first page's key.
SGLANG_ROOTS = {
    (None, "tenant-a"): "768ea3a09e6157d023220e494ee5363ece1c970f062a0dd9bc75d1913b94cf4e",
    ("lora-7", None): "f1a7f536653e45ec43f6e65edb5d9758e3079b6691f1b0750478fa9eee3782b7",
    ("lora-7", "tenant-a"): "860b0cb42f6e465c4645b851736f9faab8a13dcbfd04436908fd6b872206d1af",
    (None, ""): "4a7848fe552fa71319a3f6c542f8712277cd682d40da8671f4e9cb1de479e5ec",
    (None, "schlüssel"): "e1c1aa5d44a1a87927233939edc3fa770b25ba7271e4c8edb2814707a76880be",
}

narrow = st.integers(0, 2**32 - 1)
any_token = st.one_of(narrow, st.integers(2**32, 2**64 - 1))
texts = st.one_of(st.none(), st.text(max_size=8))


def spelled_out(tokens: list[int], page_tokens: int, root: bytes) -> list[bytes]:
    """The rule of the module's docstring, once more, as slowly as it reads."""
    keys, previous = [], root
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = tokens[start : start + page_tokens]
        if max(page) > 2**32 - 1:
            body = b"\xff" + struct.pack(f"<{page_tokens}Q", *page)
        else:
            body = struct.pack(f"<{page_tokens}I", *page)
        previous = hashlib.sha256(previous + body).digest()
        keys.append(previous)
    return keys


@pytest.mark.parametrize("name", SGLANG_CHAINS)
def test_a_chain_is_what_sglang_computes(name):
    tokens, *expected = SGLANG_CHAINS[name]
    assert [key.hex() for key in page_keys(tokens, P)] == expected


@pytest.mark.parametrize("names", SGLANG_ROOTS, ids=str)
def test_a_rooted_chain_is_what_sglang_computes(names):
    assert page_keys(COUNT_UP, P, root=root_digest(*names))[0].hex() == SGLANG_ROOTS[names]


def test_a_root_is_the_hash_of_tag_presence_lengths_and_texts():
    assert root_digest(None, None) == b""
    plain = b"sglang-cache-namespace-v1" + b"\x01" + struct.pack("<Q", 2) + b"ab" + b"\x00"
    assert root_digest("ab", None) == hashlib.sha256(plain).digest()


@given(texts, texts, texts, texts)
@example("ab", "c", "a", "bc")
def test_roots_are_equal_only_for_equal_extra_key_and_salt(extra_a, salt_a, extra_b, salt_b):
    same = (extra_a, salt_a) == (extra_b, salt_b)
    assert (root_digest(extra_a, salt_a) == root_digest(extra_b, salt_b)) is same


def test_no_extra_key_reaches_an_adapters_pages():
    roots = {root_digest(extra, salt) for extra in (None, "a", "lora:a") for salt in (None, "s")}
    adapters = [adapter_root_digest("a", None), adapter_root_digest("a", "s"), adapter_root_digest("b", None)]
    assert len(set(adapters)) == 3 and roots.isdisjoint(adapters)


@given(st.lists(any_token, max_size=40), st.integers(1, 8), st.sampled_from([b"", root_digest(None, "s")]))
def test_keys_follow_the_rule_for_any_tokens(tokens, page_tokens, root):
    assert page_keys(tokens, page_tokens, root=root) == spelled_out(tokens, page_tokens, root)


@pytest.mark.parametrize("num_tokens, num_keys", [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2)])
def test_only_full_pages_have_keys(num_tokens, num_keys):
    assert len(page_keys(list(range(num_tokens)), P)) == num_keys


@given(st.lists(any_token, min_size=12, max_size=24), st.integers(0, 5), st.booleans())
def test_continuing_from_a_parent_equals_the_whole_chain(tokens, split, salted):
    root = root_digest(None, "salt") if salted else b""
    whole = page_keys(tokens, 2, root=root)
    parent = whole[split - 1] if split else None
    assert whole[:split] + page_keys(tokens[2 * split :], 2, root=root, parent=parent) == whole


@given(st.lists(any_token, min_size=16, max_size=16), st.integers(0, 15), any_token)
def test_a_changed_token_changes_its_page_and_every_later_key_and_no_earlier_one(tokens, where, other):
    changed = [*tokens[:where], other, *tokens[where + 1 :]]
    equal = [a == b for a, b in zip(page_keys(tokens, 2), page_keys(changed, 2), strict=True)]
    unchanged = 8 if tokens[where] == other else where // 2
    assert equal == [True] * unchanged + [False] * (8 - unchanged)


@pytest.mark.parametrize(
    "tokens",
    [*(np.arange(128, dtype=dtype) for dtype in (np.int32, np.uint32, np.int64, np.uint64)),
     np.arange(128, dtype=">u4"), np.arange(128).repeat(2)[::2], tuple(COUNT_UP)],
    ids=["int32", "uint32", "int64", "uint64", "big endian", "strided", "tuple"],
)  # fmt: skip
def test_an_array_or_tuple_has_the_keys_of_its_list(tokens):
    assert page_keys(tokens, P) == page_keys(COUNT_UP, P)


@given(st.lists(any_token, max_size=40), st.integers(1, 8))
def test_an_array_of_any_tokens_has_the_keys_of_its_list(tokens, page_tokens):
    assert page_keys(np.array(tokens, dtype=np.uint64), page_tokens) == page_keys(tokens, page_tokens)


@pytest.mark.parametrize("token", [2**32 - 1, 2**32])
def test_the_bound_between_narrow_and_wide_is_the_same_in_an_array(token):
    assert page_keys(np.full(P, token), P) == page_keys([token] * P, P) == spelled_out([token] * P, P, b"")


@pytest.mark.parametrize(
    "tokens",
    [[-1] * P, [2**64] * P, [1.5] * P, ["1"] * P, np.full(P, -1), np.full(P, 0.5), np.zeros((2, P), dtype=np.uint32),
     np.zeros(P, dtype=bool)],
    ids=["negative", "too large", "fraction", "text", "negative array", "float array", "two axes", "bool array"],
)  # fmt: skip
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(ValueError, match="token"):
        page_keys(tokens, P)


@pytest.mark.parametrize(
    "page_tokens, kwargs, told",
    [(P, {"root": b"x"}, "expected"), (P, {"parent": b""}, "expected"), (P, {"parent": b"x" * 31}, "expected"),
     (0, {}, "page_tokens is 0")],
)  # fmt: skip
def test_a_root_parent_or_page_size_that_cannot_be_is_refused(page_tokens, kwargs, told):
    with pytest.raises(ValueError, match=told):
        page_keys(COUNT_UP, page_tokens, **kwargs)


def test_stand_ins_are_no_token_of_any_vocabulary_and_depend_on_the_image_and_the_position_in_it():
    values = content_tokens("image-hash", 1000)
    assert values.dtype == np.uint64 and int(values.min()) > 2**63 - 1
    assert len(set(values.tolist())) == 1000
    assert content_tokens("other-hash", 1000).tolist() != values.tolist()


@given(st.integers(0, 20), st.integers(0, 20))
def test_stand_ins_from_a_later_placeholder_on_are_a_part_of_the_whole(start, count):
    whole = content_tokens("image-hash", start + count)
    assert content_tokens("image-hash", count, start=start).tolist() == whole[start:].tolist()


def test_equal_text_around_different_images_has_different_keys():
    def prompt(image: str) -> list[bytes]:
        tokens = np.arange(128, dtype=np.uint64)
        tokens[70:80] = content_tokens(image, 10)
        return page_keys(tokens, P)

    assert prompt("a")[0] == prompt("b")[0]
    assert prompt("a")[1] != prompt("b")[1]
