"""What is configured is either in force or refused with the key, the value and what is allowed."""

from pathlib import Path

import pytest

from mooncake_connector.config.schema import Config, load_config
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
    assert (config.pool, config.capacity, config.page_tokens, config.model_id, config.eviction) == (
        None,
        None,
        64,
        None,
        "lru",
    )
    assert (config.load_deadline_s, config.save_deadline_s, config.log_level) == (5.0, 10.0, "INFO")


def test_by_default_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "128")
    assert load_config().page_tokens == 128


class TestPrecedence:
    def environ(self, tmp_path):
        return file_environ(tmp_path, "page_tokens = 16\nload_deadline_s = 1\nsave_deadline_s = 1\n") | {
            "MOONCAKE_CONNECTOR_PAGE_TOKENS": "32",
            "MOONCAKE_CONNECTOR_LOAD_DEADLINE_S": "2",
        }

    def test_the_engines_json_wins_over_environment_and_file(self, tmp_path):
        assert load_config({"page_tokens": 128}, self.environ(tmp_path)).page_tokens == 128

    def test_the_environment_wins_over_the_file(self, tmp_path):
        assert load_config({"page_tokens": 128}, self.environ(tmp_path)).load_deadline_s == 2

    def test_the_file_wins_over_the_default(self, tmp_path):
        assert load_config({"page_tokens": 128}, self.environ(tmp_path)).save_deadline_s == 1

    def test_what_no_source_has_is_the_default(self, tmp_path):
        assert load_config({"page_tokens": 128}, self.environ(tmp_path)).log_level == "INFO"

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


BAD_VALUES = [
    ("pool", "kv", "absolute path"),
    ("pool", "", "absolute path"),
    ("pool", 5, "absolute path"),
    ("pool", "/a\0b", "absolute path"),
    ("pool", "~nobody-of-that-name/kv", "absolute path"),
    ("capacity", "8 gigs", "8GiB"),
    ("capacity", 0, "1MiB"),
    ("capacity", -1, "1MiB"),
    ("capacity", "2000TiB", "1024TiB"),
    ("capacity", "9" * 30, "1024TiB"),
    ("capacity", 1e9, "8GiB"),
    ("capacity", True, "8GiB"),
    ("capacity", ["8GiB"], "8GiB"),
    ("page_tokens", 63, "power of two from 16 to 1024"),
    ("page_tokens", 8, "power of two from 16 to 1024"),
    ("page_tokens", 2048, "power of two from 16 to 1024"),
    ("page_tokens", -64, "power of two from 16 to 1024"),
    ("page_tokens", 64.0, "power of two from 16 to 1024"),
    ("page_tokens", True, "power of two from 16 to 1024"),
    ("page_tokens", "64", "power of two from 16 to 1024"),
    ("page_tokens", None, "power of two from 16 to 1024"),
    ("model_id", "", "1 to 256 characters"),
    ("model_id", ["m"], "1 to 256 characters"),
    ("model_id", 7, "1 to 256 characters"),
    ("min_hit_tokens", 0, "integer from 1 to 1048576"),
    ("min_hit_tokens", "64", "integer from 1 to 1048576"),
    ("load_deadline_s", 0, "above 0, at most 600"),
    ("load_deadline_s", -1.0, "above 0, at most 600"),
    ("load_deadline_s", float("nan"), "above 0, at most 600"),
    ("load_deadline_s", float("inf"), "above 0, at most 600"),
    ("save_deadline_s", "5", "above 0, at most 600"),
    ("save_deadline_s", True, "above 0, at most 600"),
    ("eviction", "fifo", '"lru"'),
    ("eviction", ["lru"], '"lru"'),
    ("log_level", "info", '"INFO"'),
    ("log_level", 20, '"INFO"'),
    ("sglang_takeover", 1, "true or false"),
    ("sglang_takeover", "true", "true or false"),
]


@pytest.mark.parametrize("key, value, allowed", BAD_VALUES, ids=lambda value: repr(value)[:30])
def test_a_bad_value_is_refused_with_key_value_and_what_is_allowed(key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        load_config({key: value}, {})
    message = str(caught.value)
    assert message.startswith(f"{key} in the engine's JSON is {value!r}: expected ")
    assert allowed in message


@pytest.mark.parametrize(
    "variable, text, allowed",
    [
        ("PAGE_TOKENS", "sixty-four", "power of two"),
        ("PAGE_TOKENS", "63", "power of two"),
        ("PAGE_TOKENS", "null", "power of two"),
        ("CAPACITY", "lots", "8GiB"),
        ("LOAD_DEADLINE_S", "nan", "above 0"),
        ("LOAD_DEADLINE_S", "soon", "above 0"),
        ("MIN_HIT_TOKENS", "1.5", "integer"),
        ("EVICTION", "LRU", '"lru"'),
        ("SGLANG_TAKEOVER", "mooncake", "true or false"),
    ],
)
def test_a_bad_variable_is_refused_with_its_name_value_and_what_is_allowed(variable, text, allowed):
    with pytest.raises(ConfigError) as caught:
        load_config({}, {f"MOONCAKE_CONNECTOR_{variable}": text})
    assert f"MOONCAKE_CONNECTOR_{variable} is {text!r}: expected " in str(caught.value)
    assert allowed in str(caught.value)


def test_an_unknown_key_is_refused_with_its_nearest_neighbour():
    with pytest.raises(
        ConfigError, match=r"'page_token' in the engine's JSON \(did you mean page_tokens\?\); known are"
    ):
        load_config({"page_token": 64}, {})


def test_an_unknown_variable_is_refused_with_its_nearest_neighbour():
    with pytest.raises(ConfigError, match=r"CAPACTY is unknown \(did you mean MOONCAKE_CONNECTOR_CAPACITY\?\)"):
        load_config({}, {"MOONCAKE_CONNECTOR_CAPACTY": "1GiB"})


def test_a_variable_in_lower_case_is_unknown():
    with pytest.raises(ConfigError, match="unknown"):
        load_config({}, {"MOONCAKE_CONNECTOR_capacity": "1GiB"})


def test_an_unknown_key_in_a_file_is_refused_with_the_file(tmp_path):
    environ = file_environ(tmp_path, "[pool]\nsize = 1\n")
    with pytest.raises(ConfigError, match=r"pool in file .*config\.toml, line 1 is \{'size': 1\}"):
        load_config({}, environ)


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("config.toml", "page_tokens = \n", "not valid TOML.*line 1"),
        ("config.yaml", "page_tokens: [", "not valid YAML.*line 1"),
        ("config.yaml", "- page_tokens", "holds a list"),
        ("config.yaml", "64: 64", "unknown configuration key 64"),
        ("config.json", "{}", r"suffix '\.json': expected \.toml, \.yaml or \.yml"),
        ("config.yaml", "pool: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_path(tmp_path, name, text, problem):
    with pytest.raises(ConfigError, match=f"(?s){problem}") as caught:
        load_config({}, file_environ(tmp_path, text, name))
    assert name in str(caught.value)


def test_a_file_that_is_not_there_is_refused_with_the_variable_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml \(from MOONCAKE_CONNECTOR_CONFIG\) cannot be read"):
        load_config({}, {"MOONCAKE_CONNECTOR_CONFIG": str(tmp_path / "absent.toml")})


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config({}, {"MOONCAKE_CONNECTOR_CONFIG": str(path)})


def test_hits_below_one_page_are_skipped_unless_set_otherwise():
    assert load_config({"page_tokens": 128}, {}).effective_min_hit_tokens == 128
    assert load_config({"min_hit_tokens": 1}, {}).effective_min_hit_tokens == 1
