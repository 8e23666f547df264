"""The command line as a whole: help, wrong usage, one line for any error, streams that are closed, and no traceback."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from long_form import sampled
from typer.testing import CliRunner

import mooncake_connector
from mooncake_connector import quick_start
from mooncake_connector.cli import main as main_
from mooncake_connector.cli.bench import report
from mooncake_connector.cli.main import app
from mooncake_connector.cli.output import human_seconds, human_share, styled
from mooncake_connector.sizes import human_nbytes


@pytest.fixture
def run() -> Callable:
    return lambda *arguments, **options: CliRunner().invoke(app, arguments, **options)


class TestHelp:
    @pytest.mark.parametrize("option", ["--version", "-V"])
    def test_version(self, run, option):
        result = run(option)
        assert (result.exit_code, result.stdout) == (0, f"mooncake-connector {mooncake_connector.__version__}\n")

    @pytest.mark.parametrize(
        "arguments, words",
        [
            (
                ["--help"],
                ["store", "bench", "vllm serve", "MooncakeKVConnector", "Exit codes", "--version",
                 quick_start.VLLM.splitlines()[1], quick_start.SGLANG.splitlines()[1]],
            ),
            (["store", "--help"], ["stats", "ls", "clear", "verify", "snapshot", "restore", "destroy"]),
            (["store", "stats", "--help"], ["--pool", "--json", "Examples", "mooncake-connector store stats --json"]),
            (["store", "ls", "--help"], ["--pool", "--json", "mooncake-connector store ls"]),
            (["store", "clear", "--help"], ["--yes", "--namespace", "mooncake-connector store clear"]),
            (["store", "verify", "--help"], ["Corrupt pages are removed", "mooncake-connector store verify"]),
            (["store", "snapshot", "--help"], ["DIR", "--namespace", "mooncake-connector store snapshot /var/lib/"]),
            (["store", "restore", "--help"], ["DIR", "exit code is 3", "mooncake-connector store restore /mnt/"]),
            (["top", "--help"], ["--url", "--interval", "--once", "Ctrl-C ends it", "mooncake-connector top"]),
            (["store", "destroy", "--help"], ["--yes", "mooncake-connector store destroy"]),
            (["doctor", "--help"], ["--url", "Exit codes: 0 no check failed", '"ok" is false']),
            (["record", "--help"], ["Ctrl-C ends it well", "that is no file"]),
        ],
        ids=lambda value: " ".join(value) if value[-1] == "--help" else "",
    )  # fmt: skip
    def test_help_teaches_the_command(self, run, arguments, words):
        result = run(*arguments, terminal_width=120)
        text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
        assert result.exit_code == 0
        assert [word for word in words if word not in text] == []

    def test_no_command_shows_the_help(self, run):
        assert "Usage" in run().output

    def test_an_unknown_command_is_wrong_usage(self, run):
        assert run("store", "explode").exit_code == 2


class TestErrors:
    def test_a_bad_configuration_is_one_line(self, run):
        result = run("store", "stats", env={"MOONCAKE_CONNECTOR_PAGE_TOKENS": "63"})
        assert result.exit_code == 1
        assert result.stderr.startswith("error: environment variable MOONCAKE_CONNECTOR_PAGE_TOKENS is '63': expected ")

    def test_an_unexpected_error_is_one_line_as_well(self, monkeypatch, capsys):
        monkeypatch.setattr(main_, "app", lambda: {}["gone"])
        with pytest.raises(SystemExit) as caught:
            main_.main()
        captured = capsys.readouterr()
        assert caught.value.code == 1
        assert captured.err.startswith("error: internal error, KeyError in test_cli.py:") and "'gone'" in captured.err
        assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "nbytes, text",
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), ((1 << 30) - 1, "1.0 GiB"), (16 << 30, "16.0 GiB")],
)
def test_sizes_are_in_binary_units(nbytes, text):
    assert human_nbytes(nbytes) == text


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (7200, "2.0 h"), (400000, "4.6 d")]
)
def test_ages_are_in_one_unit(seconds, text):
    assert human_seconds(seconds) == text


def test_a_share_of_nothing_is_a_dash():
    assert (human_share(1, 4), human_share(0, 0)) == ("25.0%", "-")


class TestAsACarelessUser:
    """What happens beside the straight way."""

    def test_an_empty_folder_of_a_benchmark_is_wrong_usage(self, run):
        assert run("bench", "store", "--quick", "--folder", "").exit_code == 2

    @pytest.mark.parametrize("width", ["30", "40", "80", "200"])
    def test_no_terminal_is_too_narrow_for_a_line_of_an_example(self, run, width, monkeypatch):
        text = run("store", "stats", "--help", terminal_width=int(width)).stdout
        assert "mooncake-connector store stats --json | jq '.hit_tokens / (.hit_tokens + .missed_tokens)'" in text

    def test_a_home_folder_that_is_not_there_is_wrong_usage(self, run):
        for command in (["store", "stats"], ["config", "show"]):
            result = run(*command, "--pool", "~nosuch/pool")
            assert result.exit_code == 2 and "~nosuch has no home folder" in result.stderr

    @pytest.mark.parametrize(
        "said, shown",
        [("WARNING: x: no\nWARNING: y\x1b[2K", r"WARNING: x: no\nWARNING: y\x1b[2K"), ('a "b[c]"', 'a "b[c]"')],
    )
    def test_what_a_benchmark_says_forges_no_line_and_keeps_its_square_brackets(self, capsys, said, shown):
        report.say(said)
        assert capsys.readouterr().err == shown + "\n"

    @pytest.mark.parametrize("variable, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
    def test_colours_can_be_turned_off(self, monkeypatch, variable, value):
        screen = io.StringIO()
        screen.isatty = lambda: True
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert styled("text", screen, fg="red") != "text"
        monkeypatch.setenv(variable, value)
        assert styled("text", screen, fg="red") == "text"

    def test_a_full_disk_under_the_output_is_one_line(self):
        command = [sys.executable, "-m", "mooncake_connector.cli.entry", "config", "show", "--json"]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")

    @pytest.mark.long
    @pytest.mark.parametrize(
        "command, closed", sampled(["-V", "config show"], ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
    )
    def test_a_stream_that_is_closed_is_no_error(self, command, closed):
        shell = f"{sys.executable} -m mooncake_connector.cli.entry {command} {closed}"
        done = subprocess.run(["sh", "-c", shell], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_whoever_reads_the_first_line_only_sees_no_error(self):
        command = f"{sys.executable} -m mooncake_connector.cli.entry config show | head -1"
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert done.stdout.startswith("setting") and done.stderr == ""

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
    def test_a_name_that_the_terminal_cannot_show_is_written_out(self, encoding):
        program = "from mooncake_connector.cli import main; main.app = lambda: print('模型'); main.main()"
        environ = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ)
        assert (done.returncode, done.stdout) == (0, r"\u6a21\u578b" + "\n")

    # A test run in the background is deaf to Ctrl-C, and so would be what it starts.
    CTRL_C_COUNTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "

    def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(self, tmp_path):
        interrupted = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
        (tmp_path / "typer.py").write_text(interrupted)
        program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        program += "from mooncake_connector.cli import entry; entry.main()"
        done = subprocess.run([sys.executable, "-c", self.CTRL_C_COUNTS + program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (-signal.SIGINT, "")

    def test_ctrl_c_in_a_command_leaves_no_traceback(self):
        program = (
            "import os, signal, sys; from mooncake_connector.cli import config, entry\n"
            "config.load_settings = lambda *given: os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.argv = ['mooncake-connector', 'config', 'show']; entry.main()"
        )
        done = subprocess.run([sys.executable, "-c", self.CTRL_C_COUNTS + program], capture_output=True, text=True)
        assert done.returncode == 130 and "Traceback" not in done.stderr

    def test_ctrl_c_before_a_command_has_begun_leaves_no_traceback(self, monkeypatch):
        def interrupted():
            raise KeyboardInterrupt

        monkeypatch.setattr(main_, "app", interrupted)
        with pytest.raises(SystemExit) as caught:
            main_.main()
        assert caught.value.code == 130
