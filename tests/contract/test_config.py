"""Defaults of options from files, as a user meets them on the command line."""

import json
from pathlib import Path

import pytest

from ddpdoctor.cli.app import main
from ddpdoctor.cli.config_files import read_declared
from ddpdoctor.cli.listing import load_verb
from ddpdoctor.cli.plain import read_launch, read_plain

PROJECT = """
[tool.ddpdoctor]
fail-on = "warning"
[tool.ddpdoctor.wrap]
hang-timeout = "2m"
speed = true
[tool.ddpdoctor.check-env]
timeout = 7
skip = ["xid"]
[[tool.ddpdoctor.ignore]]
code = "dd114"
reason = "until the new BIOS"
until = 2999-01-31
[[tool.ddpdoctor.ignore]]
code = "DD111"
reason = "an old one"
until = 2001-01-31
"""
USER = """
fail-on = "info"
[wrap]
hang-timeout = "3m"
check-every = 10
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder, with a file of the user's below ``home``."""
    work = tmp_path / "work" / "below"
    work.mkdir(parents=True)
    (tmp_path / "work" / "pyproject.toml").write_text(PROJECT)
    user = tmp_path / "home" / "ddpdoctor"
    user.mkdir(parents=True)
    (user / "config.toml").write_text(USER)
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user.parent))
    return tmp_path / "work"


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["ddpdoctor", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def wrap_options(*words: str, **env: str):
    kind = load_verb("wrap").Options
    return read_launch(kind, [*words, "train.py"], env, read_declared("wrap"))


@pytest.mark.usefixtures("folder")
def test_the_command_line_wins_then_the_project_then_the_user() -> None:
    options = wrap_options()
    assert (options.hang_timeout_s, options.speed, options.check_every) == (120.0, True, "10")
    assert (options.fail_on, options.ignore) == ("warning", ("DD114",))
    given = wrap_options("--hang-timeout=5s", "--no-speed", "--fail-on", "never")
    assert (given.hang_timeout_s, given.speed, given.fail_on) == (5.0, False, "never")
    assert wrap_options(DDPDOCTOR_HANG_TIMEOUT="9s") is None, "Typer reads variables"


@pytest.mark.usefixtures("folder")
def test_numbers_and_lists_of_a_file_are_read_as_typed() -> None:
    kind = load_verb("check-env").Options
    options = read_plain(kind, [], {}, read_declared("check-env"))
    assert (options.timeout_s, options.skip, options.ignore) == (7.0, ("xid",), ("DD114",))


@pytest.mark.usefixtures("folder")
def test_what_holds_is_shown_with_its_source(monkeypatch, capsys) -> None:
    monkeypatch.setenv("DDPDOCTOR_ON_HANG", "kill")
    assert call(monkeypatch, "config", "wrap", "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    values = {one["option"]: (one["value"], Path(one["source"]).name) for one in shown["options"]}
    assert values["--hang-timeout"] == ("2m", "pyproject.toml")
    assert values["--check-every"] == ("10", "config.toml")
    assert values["--on-hang"] == ("kill", "DDPDOCTOR_ON_HANG")
    assert "--quiet" not in values
    assert [(one["code"], one["expired"]) for one in shown["ignored"]] == [("DD114", False), ("DD111", True)]
    assert call(monkeypatch, "config", "wrap", "--all") == 0
    text = capsys.readouterr().out
    assert "2001-01-31 (expired)" in text
    assert "--quiet" in text


@pytest.mark.usefixtures("folder")
def test_an_ignored_finding_is_left_out_and_an_expired_one_counts(monkeypatch, capsys) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAM", "eth0")
    command = ("check-env", "--no-torch", "--format", "json", "env-danger", "env-unknown")
    assert call(monkeypatch, *command) == 1, "--fail-on warning is from the file"
    done = capsys.readouterr()
    report = json.loads(done.out)
    assert [finding["code"] for finding in report["findings"]] == ["DD111"]
    assert {check["code"]: check["outcome"] for check in report["checks"]}["DD114"] == "skipped"
    assert "DD111 was ignored until 2001-01-31" in done.err


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[wrap]\nhang-timout = '2m'", "[wrap] has the unknown key hang-timout", "hang-timeout"),
        ("[wrapp]", "has the unknown key wrapp", "wrap"),
        ("hang_timeout = '2m'", "has the unknown key hang_timeout", "hang-timeout"),
        ("[wrap]\nhang-timeout = 'soon'", "not a duration", "Give seconds"),
        ("[wrap]\non-hang = 'explode'", "on-hang is 'explode'", "auto"),
        ("[wrap]\nspeed = 'yes'", "speed is 'yes'", "true or false"),
        ("[wrap]\ncheck-every = [1]", "which the option does not take", "number"),
        ("wrap = 1", "wrap is not a table", "Write [wrap]"),
        ("[wrap", "is not valid TOML", "Correct"),
        ("[[ignore]]\ncode = 'DD114'", "needs a code, a reason and a date", "until = "),
        (
            "[[ignore]]\ncode = 'DD999'\nreason = 'x'\nuntil = 2999-01-01",
            "there is no code DD999",
            "--list",
        ),
        ("[[ignore]]\ncode = 'DD114'\nreasn = 'x'", "unknown key reasn", "reason"),
        ("ignore = 'DD114'", "is not a list of tables", "until = "),
        ("[check-env]\nnnodes = 0", "nnodes is '0'", "--help"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_to_do(folder, monkeypatch, capsys, text, message, hint) -> None:
    (folder / "pyproject.toml").write_text("")
    (folder.parent / "home" / "ddpdoctor" / "config.toml").write_text(text)
    assert call(monkeypatch, "config") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert hint in said
    assert "Traceback" not in said


@pytest.mark.usefixtures("folder")
def test_a_wrong_file_keeps_a_check_from_running(folder, monkeypatch, capsys) -> None:
    (folder / "pyproject.toml").write_text("[tool.ddpdoctor.wrap]\nnonsense = 1")
    assert call(monkeypatch, "check-env", "--list") == 2
    assert "nonsense" in capsys.readouterr().err
