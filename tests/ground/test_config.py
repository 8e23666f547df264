"""What is configured is either in force or refused with the key, the value and what is allowed."""

from pathlib import Path

import pytest

from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.config.values import parse_nbytes
from mooncake_connector.errors import ConfigError

GIB = 1 << 30


def file_environ(tmp_path: Path, text: str, name: str = "config.toml") -> dict[str, str]:
    path = tmp_path / name
    path.write_text(text)
    return {"MOONCAKE_CONNECTOR_CONFIG": str(path)}


def test_with_nothing_set_the_defaults_hold():
    config = load_config({}, {})
    assert config == Config()
    assert (config.pool, config.capacity, config.model_id) == (None, None, None)
    assert (config.page_tokens, config.eviction) == (64, None)
    assert (config.load_deadline_s, config.save_deadline_s, config.log_level) == (5.0, 10.0, "INFO")


def test_by_default_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "128")
    assert load_config().page_tokens == 128


class TestPrecedence:
    @pytest.mark.parametrize(
        "field, value", [("page_tokens", 128), ("load_deadline_s", 2), ("save_deadline_s", 1), ("log_level", "INFO")]
    )
    def test_the_engines_json_wins_over_environment_file_and_default_in_this_order(self, tmp_path, field, value):
        environ = file_environ(tmp_path, "page_tokens = 16\nload_deadline_s = 1\nsave_deadline_s = 1\n") | {
            "MOONCAKE_CONNECTOR_PAGE_TOKENS": "32",
            "MOONCAKE_CONNECTOR_LOAD_DEADLINE_S": "2",
        }
        assert getattr(load_config({"page_tokens": 128}, environ), field) == value

    def test_null_in_the_engines_json_wins_as_well(self):
        assert load_config({"model_id": None}, {"MOONCAKE_CONNECTOR_MODEL_ID": "m"}).model_id is None

    def test_a_bad_value_is_refused_also_where_another_source_wins(self, tmp_path):
        with pytest.raises(ConfigError, match="page_tokens in file"):
            load_config({"page_tokens": 64}, file_environ(tmp_path, "page_tokens = 63"))


class TestForms:
    def test_toml(self, tmp_path):
        config = load_config({}, file_environ(tmp_path, 'capacity = "1GiB"\npool = "/srv/kv"\n'))
        assert (config.capacity, config.pool) == (GIB, Path("/srv/kv"))

    @pytest.mark.parametrize("name", ["config.yaml", "config.yml", "CONFIG.YAML"])
    def test_yaml(self, tmp_path, name):
        config = load_config({}, file_environ(tmp_path, "capacity: 1GiB\nmodel_id: null\n", name))
        assert (config.capacity, config.model_id) == (GIB, None)

    def test_an_empty_yaml_file_sets_nothing(self, tmp_path):
        assert load_config({}, file_environ(tmp_path, "# nothing yet\n", "config.yaml")) == Config()

    def test_an_empty_variable_sets_nothing(self):
        assert load_config({}, {"MOONCAKE_CONNECTOR_PAGE_TOKENS": "", "MOONCAKE_CONNECTOR_CONFIG": ""}) == Config()

    def test_null_in_a_variable_is_the_default(self):
        environ = {"MOONCAKE_CONNECTOR_CAPACITY": "null", "MOONCAKE_CONNECTOR_MODEL_ID": "null"}
        assert load_config({}, environ) == Config()

    def test_a_home_folder_is_expanded(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/somebody")
        assert load_config({"pool": "~/kv"}, {}).pool == Path("/home/somebody/kv")

    def test_variables_of_others_are_left_alone(self):
        assert load_config({}, {"MOONCAKE_MASTER": "x", "PAGE_TOKENS": "y"}) == Config()


@pytest.mark.parametrize(
    "text, nbytes",
    [
        *[("4096", 4096), ("4096B", 4096), ("1KiB", 1024), ("512 MiB", GIB // 2), ("1.5gib", 3 * GIB // 2), (7, 7)],
        *[("8Gi", 8 * GIB), ("8gi", 8 * GIB), ("2Ti", 2048 * GIB), ("1Ki", 1024), ("3Mi", 3 << 20), ("1PiB", 1 << 50)],
        *[("8G", 8 * 10**9), ("8GB", 8 * 10**9), ("8g", 8 * 10**9), ("8gb", 8 * 10**9), ("1.1T", 11 * 10**11)],
        *[("5M", 5 * 10**6), ("7kB", 7000), ("1PB", 10**15)],
    ],
)
def test_a_size_in_bytes_or_binary_or_decimal_units(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "8 GiB more", "8GiBi", "8b i", "٨GiB", "9" * 100000 + "G", "1." + "1" * 100000]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="GiB"):
        parse_nbytes(text)


PATH, SIZE, POWER, TEXT = "absolute path", "8GiB", "power of two from 16 to 1024", "1 to 256 characters"
ABOVE_0, BOOLEAN = "above 0, at most", "true or false"
BAD_VALUES = [
    ("pool", PATH, ["kv", "", 5, "/a\0b", "~nobody-of-that-name/kv"]),
    ("capacity", SIZE, ["8 gigs", 1e9, True, ["8GiB"]]),
    ("capacity", "1MiB", [0, -1]),
    ("capacity", "1024TiB", ["2000TiB", "9" * 30]),
    ("page_tokens", POWER, [63, 8, 2048, -64, 64.0, True, "64", None]),
    ("model_id", TEXT, ["", " ", "\t\n", ["m"], 7]),
    ("min_hit_tokens", "integer from 1 to 1048576", [0, "64"]),
    ("load_deadline_s", f"{ABOVE_0} 600", [0, -1.0, float("nan"), float("inf")]),
    ("save_deadline_s", f"{ABOVE_0} 600", ["5", True]),
    ("eviction", '"s3-fifo"', ["fifo", ["lru"]]),
    ("log_level", '"INFO"', ["info", 20]),
    ("sglang_takeover", BOOLEAN, [1, "true"]),
    ("prefix_reuse", BOOLEAN, [0]),
    ("transports", "a list of ", [[], ["tcp", "tcp"], ["tcp", 5], ["TCP"], [""], ["t" * 33], {"tcp": 1}, None, 5]),
    ("transports", "each at most once, at least one", [[], ["tcp", "tcp"]]),
    ("transfer_port", "0 to 65535", [-1, 65536, "80"]),
    ("secret_file", PATH, [7]),
    ("tls_key", PATH, [""]),
    ("granularity", '"auto", "full", "chunk" or "layer"', ["block"]),
    ("granularity_chunk_tokens", "at most `granularity_layer_tokens`", [-1]),
    ("granularity_layer_tokens", "at least `granularity_chunk_tokens`", [1 << 31]),
    ("transfer_deadline_s", f"{ABOVE_0} 3600", [0, 3601]),
    ("transfer_lease_s", "from 1 to 3600", [0.5, float("nan")]),
    ("transfer_failure", '"recompute" or "fail"', ["retry"]),
]


@pytest.mark.parametrize(
    "key, value, allowed", [(key, value, allowed) for key, allowed, values in BAD_VALUES for value in values],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_a_bad_value_is_refused_with_key_value_and_what_is_allowed(key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        load_config({key: value}, {})
    message = str(caught.value)
    assert message.startswith(f"{key} in the engine's JSON is {value!r}: expected ") and allowed in message


BAD_VARIABLES = [
    ("PAGE_TOKENS", "power of two", ["sixty-four", "63", "null"]),
    ("CAPACITY", SIZE, ["lots"]),
    ("LOAD_DEADLINE_S", "above 0", ["nan", "soon"]),
    ("MIN_HIT_TOKENS", "integer", ["1.5"]),
    ("EVICTION", '"lru"', ["LRU"]),
    ("SGLANG_TAKEOVER", BOOLEAN, ["mooncake"]),
    ("TRANSPORTS", "a list", ["tcp,", "tcp,,cma", "tcp,tcp", ",", "tcp cma"]),
]


@pytest.mark.parametrize(
    "variable, text, allowed", [(name, text, allowed) for name, allowed, texts in BAD_VARIABLES for text in texts]
)
def test_a_bad_variable_is_refused_with_its_name_value_and_what_is_allowed(variable, text, allowed):
    with pytest.raises(ConfigError) as caught:
        load_config({}, {f"MOONCAKE_CONNECTOR_{variable}": text})
    assert f"MOONCAKE_CONNECTOR_{variable} is {text!r}: expected " in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    "settings, environ, told",
    [
        ({"page_token": 64}, {}, r"'page_token' in the engine's JSON \(did you mean page_tokens\?\); known are"),
        ({}, {"CAPACTY": "1GiB"}, r"CAPACTY is unknown \(did you mean MOONCAKE_CONNECTOR_CAPACITY\?\)"),
        ({}, {"capacity": "1GiB"}, "MOONCAKE_CONNECTOR_capacity is unknown"),
    ],
    ids=["key", "variable", "lower case"],
)
def test_what_is_unknown_is_refused_with_its_nearest_neighbour(settings, environ, told):
    with pytest.raises(ConfigError, match=told):
        load_config(settings, {f"MOONCAKE_CONNECTOR_{name}": text for name, text in environ.items()})


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("config.toml", "[pool]\nsize = 1\n", r"pool in file .*config\.toml, line 1 is \{'size': 1\}"),
        ("config.toml", "page_tokens = \n", "not valid TOML.*line 1"),
        ("config.yaml", "page_tokens: [", "not valid YAML.*line 1"),
        ("config.yaml", "- page_tokens", "holds a list"),
        ("config.yaml", "64: 64", "unknown configuration key 64"),
        ("config.json", "{}", r"MOONCAKE_CONNECTOR_CONFIG\) has suffix '\.json': expected \.toml, \.yaml or \.yml"),
        ("config.yaml", "pool: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_path(tmp_path, name, text, problem):
    with pytest.raises(ConfigError, match=f"(?s){problem}") as caught:
        load_config({}, file_environ(tmp_path, text, name))
    assert name in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_with_the_variable_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml \(from MOONCAKE_CONNECTOR_CONFIG\) cannot be read"):
        load_config({}, {"MOONCAKE_CONNECTOR_CONFIG": str(tmp_path / "absent.toml")})


def test_hits_below_one_page_are_skipped_unless_set_otherwise():
    assert load_config({"page_tokens": 128}, {}).effective_min_hit_tokens == 128
    assert load_config({"min_hit_tokens": 1}, {}).effective_min_hit_tokens == 1
