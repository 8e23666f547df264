"""Configuration that was broken, by accident or on purpose: an error that names the place, at once."""

import json
import re
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples

from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.config.tiers import ALLOWED, KINDS, Tiers
from mooncake_connector.errors import ConfigError

LONGEST_MESSAGE = 1500  # names every setting there is


def refusal(tmp_path, name: str, content: "str | bytes") -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return refused({}, {"MOONCAKE_CONNECTOR_CONFIG": str(path)})


def refused(engine_json, environ) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(engine_json, environ)
    message = str(caught.value)
    assert len(message) < LONGEST_MESSAGE and "\n" not in message and message.isprintable()
    return message


SERVICE = {
    f"MOONCAKE_CONNECTOR_{name}": value
    for name, value in {
        "SERVICE_HOST": "10.96.0.12",
        "SERVICE_PORT": "6379",
        "SERVICE_PORT_HTTP": "6379",
        "PORT": "tcp://10.96.0.12:6379",
        "PORT_6379_TCP": "tcp://10.96.0.12:6379",
        "PORT_6379_TCP_PROTO": "tcp",
        "PORT_6379_TCP_PORT": "6379",
        "PORT_6379_TCP_ADDR": "10.96.0.12",
    }.items()
}


class TestKubernetes:
    """A Service's name becomes variables in every pod of its namespace."""

    @pytest.mark.parametrize("name", ["", "DECODE_", "TRANSFER_", "PREFILL_0_"])
    def test_the_variables_of_a_service_whose_name_begins_like_ours_are_ignored(self, name):
        environ = {key.replace("CONNECTOR_", f"CONNECTOR_{name}"): value for key, value in SERVICE.items()}
        assert load_config({}, environ) == Config()

    @pytest.mark.parametrize("variable", SERVICE)
    def test_each_of_them_alone_is_ignored(self, variable):
        assert load_config({}, {variable: SERVICE[variable]}) == Config()

    def test_a_service_may_have_an_ipv6_address(self):
        environ = {
            "MOONCAKE_CONNECTOR_SERVICE_HOST": "fd00::12",
            "MOONCAKE_CONNECTOR_PORT_53_UDP": "udp://[fd00::12]:53",
            "MOONCAKE_CONNECTOR_PORT_53_UDP_ADDR": "fd00::12",
        }
        assert load_config({}, environ) == Config()

    def test_what_is_ours_beside_them_is_read(self):
        assert load_config({}, SERVICE | {"MOONCAKE_CONNECTOR_TRANSFER_PORT": "8200"}).transfer_port == 8200

    @pytest.mark.parametrize(
        "variable, value, meant",
        [
            ("PORT", "8200", "TRANSFER_PORT"),
            ("SERVICE_HOST", "decode-0", "TRANSFER_HOSTS"),
            ("TRANSFER_PORTS", "8200", "TRANSFER_PORT"),
            ("TRANSFER_PORT_8200", "tcp", "TRANSFER_PORT"),
        ],
    )
    def test_a_slip_that_looks_like_one_of_them_is_still_an_error(self, variable, value, meant):
        message = refused({}, {f"MOONCAKE_CONNECTOR_{variable}": value})
        named, _, known = message.partition(" is unknown")
        assert named.endswith(f"MOONCAKE_CONNECTOR_{variable}") and f"{meant}, " in known.partition(" known are")[2]

    def test_a_url_as_our_port_is_an_error_where_no_service_explains_it(self):
        assert "from 0 to 65535" in refused({}, {"MOONCAKE_CONNECTOR_TRANSFER_PORT": "tcp://10.0.0.1:8200"})


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join([*lines, f"pool: *a{levels - 1}"])


class TestYaml:
    @pytest.mark.parametrize(
        "text, line, problem",
        [
            ("page_tokens: 64\npool: &a [x]\ntransports: *a\n", 2, "anchor"),
            (bomb(9), 1, "anchor"),
            ("page_tokens: 64\ntransports: " + "[" * 20000, 2, "deep"),
            ("page_tokens: 64\ntransports: " + "{a: " * 5000, 2, "deep"),
            ("page_tokens: 64\ntransports:\n  " + "- " * 20000, 3, "deep"),
            ("page_tokens: 64\npage_tokens: 128\n", 2, "page_tokens"),
            ("\n\npage_tokens: [\n", 4, ""),
            ("page_tokens: 64\npool: \0\n", 2, "0000"),
            ("log_level: !!python/name:os.system\n", 1, ""),
            ("log_level: !!int abc\n", 1, "log_level"),
            ("page_tokens: 64\nlog_level: 2001-99-99\n", 2, "log_level"),
            ("log_level: !!bool maybe\n", 1, "log_level"),
            ("log_level: !!timestamp x\n", 1, "log_level"),
            ("? [a, b]\n: 1\n", 1, "key"),
            ("page_tokens: 64\n---\npage_tokens: 64\n", 2, ""),
            ("page_tokens: " + "9" * 10000, 1, "page_tokens"),
        ],
        ids=lambda value: repr(value)[:30],
    )
    def test_the_line_is_named(self, tmp_path, text, line, problem):
        message = refusal(tmp_path, "c.yaml", text)
        assert "c.yaml" in message and f"line {line}" in message and problem in message

    @pytest.mark.parametrize(
        "value", ["0x" + "f" * 30000, "1" + ":59" * 15000, ".inf", "1e999", "'" + "x" * 30000 + "'"]
    )
    def test_a_value_beyond_all_bounds_is_an_error_of_its_key(self, tmp_path, value):
        assert "capacity" in refusal(tmp_path, "c.yaml", f"capacity: {value}\n")


class TestToml:
    @pytest.mark.parametrize(
        "text, problem",
        [
            ("page_tokens = 64\ntransports = " + "[" * 20000, "line 2"),
            ("page_tokens = 64\ntransports = " + "{a=" * 15000, "deep"),
            ("page_tokens = 64\npage_tokens = 64\n", "line 2"),
            ("page_tokens = 64\npool = '\0'\n", "line 2"),
            ("capacity = " + "9" * 10000, "capacity"),
            ("capacity = 0x" + "f" * 30000, "capacity"),
            ("a." * 30000 + "a = 1", "dots"),
            ("page_tokens = 1979-05-27T07:32:00Z", "page_tokens"),
        ],
        ids=lambda value: repr(value)[:30],
    )
    def test_the_place_is_named(self, tmp_path, text, problem):
        message = refusal(tmp_path, "c.toml", text)
        assert "c.toml" in message and problem in message

    @pytest.mark.parametrize("key", ["xyz", " xyz", '"xyz"', "'xyz'", "xyz.a", "'the xyz'"], ids=repr)
    @pytest.mark.parametrize("before", ["", "\n", "# xyz\n", 'transports = [\n "cma"\n]\n'], ids=repr)
    def test_the_line_of_an_unknown_key_is_named(self, tmp_path, key, before):
        message = refusal(tmp_path, "c.toml", f"{before}{key} = 1\n[capacity]\nxyz = 2\n")
        assert "xyz' in file" in message and f"c.toml, line {before.count(chr(10)) + 1};" in message

    @pytest.mark.parametrize("table", ["[xyz]", "[ xyz ]", "[xyz.a]", "[[xyz]]"])
    def test_so_is_that_of_a_table(self, tmp_path, table):
        assert "c.toml, line 2;" in refusal(tmp_path, "c.toml", f"\n{table}\na = 1\n")

    def test_the_file_is_not_searched_for_each_of_its_keys(self, tmp_path, monkeypatch):
        searches, search = [], re.search

        def counted(*arguments):
            searches.append(arguments)
            return search(*arguments)

        monkeypatch.setattr(re, "search", counted)
        assert "line 1;" in refusal(tmp_path, "c.toml", "".join(f"key{number} = 1\n" for number in range(4000)))
        assert len(searches) < 100


PIECES = [
    *["page_tokens", "capacity", "pool", ":", "=", " ", "\n", "\n\n", "- ", "? ", "[", "]", "{", "}", ",", "#", "."],
    *["!!int ", "!!float ", "!!bool ", "!!null ", "!!binary ", "!!timestamp ", "!!set ", "!!omap ", "!!pairs ", "'"],
    *["&a ", "*a", "<<", "|", ">", "%YAML 9.9", "---", "...", "0x", "1:2", "2001-99-99", "64", ".inf", "!!map ", '"'],
]


class TestFiles:
    @pytest.mark.parametrize("name", ["c.toml", "c.yaml"])
    def test_a_file_that_is_too_large_is_not_parsed(self, tmp_path, name):
        assert "64.0 KiB" in refusal(tmp_path, name, "# x\n" * 20000)

    @pytest.mark.parametrize("name", ["c.toml", "c.yaml"])
    def test_the_line_that_is_not_utf_8_is_named(self, tmp_path, name):
        message = refusal(tmp_path, name, b"# one\n# two\n# \xff\n")
        assert "UTF-8" in message and "line 3" in message

    @pytest.mark.parametrize("name", ["c.toml", "c.yaml"])
    def test_a_byte_order_mark_is_no_part_of_the_first_key(self, tmp_path, name):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + (b"page_tokens = 128" if name == "c.toml" else b"page_tokens: 128"))
        assert load_config({}, {"MOONCAKE_CONNECTOR_CONFIG": str(path)}).page_tokens == 128

    @given(text=st.text() | st.lists(st.sampled_from(PIECES)).map("".join), name=st.sampled_from(["c.toml", "c.yaml"]))
    @settings(max_examples=examples(200))
    def test_whatever_it_holds_the_outcome_is_a_configuration_or_an_error(self, tmp_path_factory, text, name):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            load_config({}, {"MOONCAKE_CONNECTOR_CONFIG": str(path)})
        except ConfigError as error:
            assert "\n" not in str(error)

    def test_a_folder_or_a_name_with_nul_is_refused(self, tmp_path):
        (tmp_path / "c.toml").mkdir()
        assert "c.toml" in refused({}, {"MOONCAKE_CONNECTOR_CONFIG": str(tmp_path / "c.toml")})
        assert "MOONCAKE_CONNECTOR_CONFIG" in refused({}, {"MOONCAKE_CONNECTOR_CONFIG": "/etc/a\0.toml"})

    def test_a_pipe_that_nobody_writes_to_is_refused_at_once(self, tmp_path):
        program = (
            "import os, sys; from mooncake_connector.config.sources import load_config\n"
            "os.mkfifo(sys.argv[1]); load_config({}, {'MOONCAKE_CONNECTOR_CONFIG': sys.argv[1]})"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "c.toml")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "is no regular file" in done.stderr


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


class TestTheEnginesJson:
    @pytest.mark.parametrize(
        "value", [nested(50000), 10**10000, "9" * 100000, "x" * 100000, ["x" * 100000] * 1000],
        ids=["deep", "huge number", "long digits", "long text", "long list"],
    )  # fmt: skip
    @pytest.mark.parametrize("key", list(Config.__struct_fields__))
    def test_a_monstrous_value_is_an_error_of_its_key(self, key, value):
        assert refused({key: value}, {}).startswith(key)

    def test_what_is_no_text_for_a_terminal_does_not_reach_it(self):
        assert refused({"pool": "\x1b[31m\n\0"}, {}).startswith("pool")
        assert "unknown" in refused({"x\n" * 100000: 1}, {})
        assert "unknown" in refused({}, {"MOONCAKE_CONNECTOR_" + "X" * 100000: "1"})

    @pytest.mark.parametrize("key", ["secret_file", "tls_key"])
    def test_a_secret_in_place_of_the_file_that_holds_it_is_not_shown(self, key):
        message = refused({key: "hunter2-is-my-secret"}, {})
        assert "hunter2" not in message and "absolute path" in message


WORDS = st.sampled_from(
    [*KINDS, "kind", "name", "path", "capacity", "write", "url", "/a", "/a/../b", "~", "1GiB", "s3://a/b", "\ud800", ""]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | WORDS
ANY_JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9) | WORDS, inner, max_size=4)
)
ENTRIES = st.fixed_dictionaries(
    {"kind": st.sampled_from(list(KINDS)) | ANY_JSON},
    optional={
        "name": WORDS | ANY_JSON, "path": WORDS | ANY_JSON, "capacity": WORDS | ANY_JSON, "url": WORDS | ANY_JSON,
        "write": WORDS | ANY_JSON, "timeout_s": ANY_JSON | st.just(10**400), "replicas": ANY_JSON,
    },
)  # fmt: skip


def disk(path: str, kind: str = "disk", **more: str) -> "dict[str, str]":
    return {"kind": kind, "path": path, "capacity": "1GiB", **more}


class TestTiers:
    @given(value=ANY_JSON | st.lists(ENTRIES | ANY_JSON, max_size=4))
    @settings(max_examples=examples(300))
    def test_whatever_they_hold_the_outcome_is_tiers_or_an_error(self, tmp_path_factory, value):
        secret = {"secret_file": str(tmp_path_factory.getbasetemp())}
        try:
            assert isinstance(load_config({"tiers": value, **secret}, {}).tiers, Tiers)
        except ConfigError as error:
            assert str(error).isprintable()

    @pytest.mark.parametrize("kind", [["disk"], {"disk": "hunter2"}, 5, None, 1.5, True], ids=repr)
    def test_a_kind_that_is_no_text_is_refused(self, kind):
        message = refused({"tiers": ["mooncake", {"kind": kind, "path": "/hunter2"}]}, {})
        assert "tier 2 is of kind" in message and "one of mooncake, disk" in message and "hunter2" not in message

    def test_a_monstrous_value_of_a_setting_is_not_repeated(self):
        assert "tier 1 (disk)" in refused({"tiers": [disk("/a", write="x" * 100000)]}, {})

    @pytest.mark.parametrize(
        "value",
        [
            [{"kind": "s3", "secret_key": "hunter2"}],
            [{"kind": "object", "url": "s3://a", "secret_key": "hunter2"}],
            [{"secret_key": "hunter2"}],
            {"kind": "object", "secret_key": "hunter2"},
            [[{"secret_key": "hunter2"}]],
            [{"kind": "disk", "secret_key": "hunter2"}] * 9,
            [{"kind": "object", "url": "https://me:hunter2@host"}],
        ],
        ids=["wrong kind", "unknown key", "no kind", "no list", "a list in the list", "too many", "url"],
    )
    def test_what_may_be_secret_is_not_shown(self, value):
        assert "hunter2" not in refused({"tiers": value}, {})
        assert "hunter2" not in refused({}, {"MOONCAKE_CONNECTOR_TIERS": json.dumps(value)})

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_wrong_value_is_told_with_its_key_and_what_is_allowed(self, kind):
        required = {"path": "/a", "capacity": "1GiB", "url": "s3://a"}
        for field in msgspec.structs.fields(KINDS[kind]):
            given = {name: value for name, value in required.items() if name in KINDS[kind].__struct_fields__}
            wrong = [] if field.name in ("url", "endpoint") else -5
            seen = "a list" if wrong == [] else "-5"
            message = refused({"tiers": [{"kind": kind, **given, field.name: wrong}]}, {})
            assert f"tier 1 ({kind}): {field.name} is {seen}: expected {ALLOWED[field.name]}" in message
            assert message.endswith(", or null") == (field.default is None)

    def test_text_that_begins_as_json_and_is_none_is_told_what_to_do(self):
        message = refused({}, {"MOONCAKE_CONNECTOR_TIERS": "[{kind: disk}]"})
        assert message.startswith("environment variable MOONCAKE_CONNECTOR_TIERS: it begins as JSON and is none")
        assert message.endswith("put it in single quotes for a shell")

    @pytest.mark.parametrize("kind", ["disk", "folder"])
    def test_two_on_one_path_are_refused(self, tmp_path, kind):
        tiers = [disk(str(tmp_path)), disk(f"{tmp_path}/x/..", kind, name="other")]
        assert f"disk and other have the same path '{tmp_path}'" in refused({"tiers": tiers}, {})
        (tmp_path / "link").symlink_to(tmp_path)
        tiers = [disk(str(tmp_path)), disk(f"{tmp_path}/link", name="other")]
        assert "have the same path" in refused({"tiers": tiers}, {})
        tiers[1]["path"] = str(tmp_path / "below")
        assert len(load_config({"tiers": tiers}, {}).tiers) == 2

    @pytest.mark.parametrize("below", ["", "/a", "/../pool/a"])
    def test_one_in_the_pools_folder_is_refused(self, tmp_path, below):
        message = refused({"pool": str(tmp_path / "pool"), "tiers": [disk(f"{tmp_path}/pool{below}")]}, {})
        assert "has disk with path" in message and "pool in the engine's JSON is" in message
        beside = {"pool": str(tmp_path / "pool"), "tiers": [disk(f"{tmp_path}/pool-disk")]}
        assert load_config(beside, {}).tiers[0].path == tmp_path / "pool-disk"


@pytest.mark.parametrize("value", [["not", "keys"], "text", 5])
def test_an_engines_json_that_holds_no_keys_is_refused(value):
    assert "engine's JSON" in refused(value, {})
