"""Defaults of options from files, as a user meets them on the command line."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.cli.app import main
from ddpdoctor.cli.config import ACTING, key_of, read_declared
from ddpdoctor.cli.options import ACTIONS, METRICS, VERBS, Option, declared_by, load_verb
from ddpdoctor.cli.verbs import read_command_line
from tests import golden
from tests.scenarios.running import clean_environment

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


OTHER_UID, OTHER_GID = 54321, 54322


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


def wrap_options(*words: str):
    return read_command_line(["wrap", *words, "train.py"])[1]


@pytest.mark.usefixtures("folder")
def test_the_command_line_wins_then_variables_then_the_project_then_the_user(monkeypatch) -> None:
    options = wrap_options()
    assert (options.hang_timeout_s, options.speed, options.check_every) == (120.0, True, "10")
    assert (options.fail_on, options.ignore) == ("warning", ("DD114",))
    given = wrap_options("--hang-timeout=5s", "--no-speed", "--fail-on", "never")
    assert (given.hang_timeout_s, given.speed, given.fail_on) == (5.0, False, "never")
    monkeypatch.setenv("DDPDOCTOR_HANG_TIMEOUT", "9s")
    assert (wrap_options().hang_timeout_s, wrap_options("--hang-timeout=5s").hang_timeout_s) == (9.0, 5.0)


@pytest.mark.usefixtures("folder")
def test_numbers_and_lists_of_a_file_are_read_as_typed() -> None:
    _, options = read_command_line(["check-env"])
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


def said_of_a_wrong_file(request: pytest.FixtureRequest, text: str) -> str:
    folder, monkeypatch, capsys = map(request.getfixturevalue, ("folder", "monkeypatch", "capsys"))
    (folder / "pyproject.toml").write_text("")
    (folder.parent / "home" / "ddpdoctor" / "config.toml").write_text(text)
    assert call(monkeypatch, "config") == 2
    return " ".join(capsys.readouterr().err.replace(str(folder.parent), "").split())


test_words = golden.words(__name__, said_of_a_wrong_file=said_of_a_wrong_file)


@pytest.mark.usefixtures("folder")
def test_a_wrong_file_keeps_a_check_from_running(folder, monkeypatch, capsys) -> None:
    (folder / "pyproject.toml").write_text("[tool.ddpdoctor.wrap]\nnonsense = 1")
    assert call(monkeypatch, "check-env", "--list") == 2
    assert "nonsense" in capsys.readouterr().err


# Files of other users


@dataclass
class Project:
    """A project two folders below one that others may know."""

    top: Path
    above: Path
    work: Path
    file: Path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    work = tmp_path / "above" / "work"
    work.mkdir(parents=True, mode=0o755)
    file = work / "pyproject.toml"
    file.write_text("[tool.ddpdoctor.wrap]\nhang-timeout = '2m'")
    file.chmod(0o644)
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return Project(tmp_path, tmp_path / "above", work, file)


def give(path: Path, uid: int = OTHER_UID, gid: int = -1) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files to other users")
    os.chown(path, uid, gid, follow_symlinks=False)


def list_user(path: Path, rights: int) -> None:
    """Give one more user rights by an access control list, as `setfacl -m u:54321:rw` does."""
    entries = [
        (1, 7, 2**32 - 1),
        (2, rights, OTHER_UID),
        (4, 5, 2**32 - 1),
        (16, rights | 5, 2**32 - 1),
        (32, 5, 2**32 - 1),
    ]
    text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", text)
    except OSError:
        pytest.skip("no access control lists here")


def link(project: Project, to: Path) -> None:
    project.file.replace(to)
    project.file.symlink_to(to)


TRUSTED = {
    "as git makes it": lambda _: None,
    "the group is this user's or root's own": lambda p: [p.work.chmod(0o775), p.file.chmod(0o664)],
    "a list lets another user read it": lambda p: list_user(p.file, 4),
    "below a folder like /tmp": lambda p: p.above.chmod(0o1777),
    "a folder of others' own beside it": lambda p: [(p.above / "other").mkdir(mode=0o777), give(p.above / "other")],
    "a link to a file of the user's": lambda p: link(p, p.top / "settings.toml"),
}
NOT_TRUSTED = {
    "another user's file": (lambda p: give(p.file), "it belongs to user 54321, and ddpdoctor runs as"),
    "another user's project, by sudo": (
        lambda p: [give(one) for one in (p.above, p.work, p.file)],
        "it belongs to user 54321, and ddpdoctor runs as root",
    ),
    "all may write it": (lambda p: p.file.chmod(0o666), "other users may write it. Run `chmod go-w"),
    "a group may write it": (
        lambda p: [give(p.file, 0, OTHER_GID), p.file.chmod(0o664)],
        "other users may write it. Run `chmod go-w",
    ),
    "a list lets another user write it": (lambda p: list_user(p.file, 6), "other users may write it. Run `chmod go-w"),
    "a list lets another user write its folder": (lambda p: list_user(p.work, 7), "may write the folder"),
    "a list lets another user move its folder": (lambda p: list_user(p.above, 7), "may write the folder"),
    "all may write its folder": (lambda p: p.work.chmod(0o777), "may write the folder"),
    "its folder is like /tmp": (lambda p: p.work.chmod(0o1777), "If you trust them, copy the settings into"),
    "a group may write its folder": (
        lambda p: [give(p.work, 0, OTHER_GID), p.work.chmod(0o2775)],
        "may write the folder",
    ),
    "its folder is another user's": (lambda p: give(p.work), "belongs to user 54321"),
    "all may move its folder": (lambda p: p.above.chmod(0o777), "may write the folder"),
    "another user may move its folder": (lambda p: give(p.above), "belongs to user 54321"),
    "another user's link": (lambda p: [link(p, p.top / "settings.toml"), give(p.file)], "it belongs to user 54321"),
    "a link to another user's file": (
        lambda p: [link(p, p.top / "settings.toml"), give(p.top / "settings.toml")],
        "the file that it links to belongs to user 54321",
    ),
    "a link to a file whose folder all may write": (
        lambda p: [(p.top / "open").mkdir(), (p.top / "open").chmod(0o777), link(p, p.top / "open" / "settings.toml")],
        "may write the folder",
    ),
}


def hang_timeout() -> str:
    (one,) = (one for one in read_declared("wrap", load_verb("wrap").Options) if one.field == "hang_timeout_s")
    return str(one.default)


@pytest.mark.parametrize("case", TRUSTED)
def test_a_file_that_nobody_else_can_have_written_is_used(case: str, project: Project, capsys) -> None:
    TRUSTED[case](project)
    assert hang_timeout() == "2m"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("case", NOT_TRUSTED)
def test_a_file_that_others_may_have_written_is_not_used_and_a_note_says_why(case, project, monkeypatch, capsys):
    prepare, reason = NOT_TRUSTED[case]
    prepare(project)
    assert hang_timeout() != "2m"
    said = " ".join(capsys.readouterr().err.split())
    assert "the settings in" in said
    assert reason in said
    assert "home/ddpdoctor/config.toml" in said
    assert call(monkeypatch, "config", "--format", "json") == 0
    (left_out,) = json.loads(capsys.readouterr().out)["left_out"]
    assert left_out["path"] == str(project.file)
    assert call(monkeypatch, "check-env", "--list") == 0


@pytest.mark.parametrize(
    "text", [b"[tool.ddpdoctor", b"[tool.ddpdoctor.wrap]\nnonsense = 1", b"[tool.ddpdoctor]\nx = '\xff'"]
)
def test_a_wrong_file_of_others_is_no_error(text: bytes, project: Project, monkeypatch, capsys) -> None:
    project.file.write_bytes(text)
    give(project.file)
    assert call(monkeypatch, "check-env", "--list") == 0
    assert "are not used" in capsys.readouterr().err


def test_a_note_is_said_once_and_not_by_completion(project: Project, monkeypatch, capsys) -> None:
    project.file.write_text("[tool.ddpdoctor.wrap]\non-finding = 'touch x'")
    for words in (("wrap", "--help"), ("wrap", "--format", "xml")):
        call(monkeypatch, *words)
        assert " ".join(capsys.readouterr().err.split()).count("on-finding in [tool.ddpdoctor.wrap]") == 1
    monkeypatch.setenv("_DDPDOCTOR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "ddpdoctor wrap --on")
    monkeypatch.setenv("COMP_CWORD", "2")
    call(monkeypatch)
    assert "on-finding in" not in capsys.readouterr().err


def test_who_runs_it_by_sudo_is_told_to_leave_that_out(project: Project, monkeypatch, capsys) -> None:
    for one in (project.above, project.work, project.file):
        give(one)
    monkeypatch.setenv("SUDO_UID", str(OTHER_UID))
    assert hang_timeout() != "2m"
    assert "Run ddpdoctor without sudo, or copy the settings into" in " ".join(capsys.readouterr().err.split())


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)
    give(file)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda p: [p.file.write_text("[project]\nname = 'theirs'"), give(p.file)],
        lambda p: [p.file.write_bytes(bytes(2**21)), give(p.file)],
        lambda p: pipe(p.file),
        lambda p: [p.file.unlink(), p.file.mkdir(), give(p.file)],
    ],
    ids=["has no settings", "is too large", "is a pipe", "is a folder"],
)
def test_a_file_of_others_without_settings_costs_no_word(prepare, project: Project, monkeypatch, capsys) -> None:
    prepare(project)
    assert call(monkeypatch, "check-env", "--list") == 0
    assert capsys.readouterr().err == ""


def test_a_user_s_own_file_must_be_the_user_s(project: Project, capsys) -> None:
    """HOME may be another user's under sudo."""
    project.file.unlink()
    own = project.top / "home" / "ddpdoctor" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text("[wrap]\non-finding = 'touch x'\nhang-timeout = '3m'")
    assert wrap_options().on_finding == "touch x"
    give(own)
    assert wrap_options().on_finding is None
    assert "belongs to user 54321" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "is_used"),
    [
        ({"XDG_CONFIG_HOME": "home"}, False),
        ({"XDG_CONFIG_HOME": "", "HOME": "home"}, False),
        ({"XDG_CONFIG_HOME": "./home", "HOME": "{top}"}, True),
        ({"XDG_CONFIG_HOME": "", "HOME": "{top}"}, True),
    ],
)
def test_a_user_s_own_file_is_not_looked_for_in_the_project(variables, is_used, project: Project, monkeypatch) -> None:
    """A relative path leads into the current folder, which may be a checkout of what others wrote."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(top=project.top))
    for folder in (project.work / "home", project.work / "home" / ".config", project.top / ".config"):
        (folder / "ddpdoctor").mkdir(parents=True)
        (folder / "ddpdoctor" / "config.toml").write_text(f"[wrap]\non-finding = 'touch {folder.parent.name}'")
    assert wrap_options().on_finding == (f"touch {project.top.name}" if is_used else None)


@pytest.mark.parametrize(
    ("option", "given", "is_used"),
    [
        ("--map-root-user", ("above",), True),
        ("--map-root-user", ("work",), False),
        ("--map-root-user", ("file",), False),
        ("--user", (), False),
    ],
    ids=["the folder above", "its folder", "the file", "no user is known, not even this one"],
)
def test_in_a_container_who_is_not_known_looks_like_nobody(option, given, is_used, project: Project) -> None:
    """The host's folders above a project are no harm. Whose a file or its folder is must be known."""
    for name in given:
        give(getattr(project, name))
    script = (
        "from pathlib import Path; from ddpdoctor.cli.config import find_distrust;"
        "print(find_distrust(Path('pyproject.toml'), with_ancestors=True))"
    )
    start = ["unshare", "--user", option]
    if subprocess.run([*start, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    env = {**os.environ, "PYTHONPATH": str(Path(ddpdoctor.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*start, sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env, cwd=project.work
    )
    assert done.stdout == "None\n" if is_used else "a user that this container does not know" in done.stdout


# Options that act


VALUES = {"slurm": "1", "rdzv-endpoint": "host:1", "master-addr": "host"}


def acting() -> list[tuple[str, str]]:
    return [
        (verb, key_of(one))
        for verb in VERBS
        for one in declared_by(load_verb(verb).Options)
        if isinstance(one.option, Option) and key_of(one) in ACTING
    ]


@pytest.mark.parametrize(("verb", "key"), acting())
def test_an_option_that_acts_comes_from_the_user_only(verb, key, project, capsys) -> None:
    (one,) = (one for one in declared_by(load_verb(verb).Options) if one.names[0] == f"--{key}")
    text = f"{key} = " + ("true" if one.type is bool else json.dumps(VALUES.get(key, "x:y")))
    project.file.write_text("")
    before = {one.field: one.default for one in read_declared(verb, load_verb(verb).Options)}
    for table in (f"[tool.ddpdoctor.{verb}]\n{text}", f"[tool.ddpdoctor]\n{text}"):
        project.file.write_text(table)
        assert {one.field: one.default for one in read_declared(verb, load_verb(verb).Options)} == before
        said = " ".join(capsys.readouterr().err.split())
        assert f"{key} in [tool.ddpdoctor" in said
        assert "a project's file cannot set what runs, sends or writes something" in said
    project.file.write_text("")
    own = project.top / "home" / "ddpdoctor" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text(f"[{verb}]\n{text}")
    assert {one.field: one.default for one in read_declared(verb, load_verb(verb).Options)} != before
    assert capsys.readouterr().err == ""


READS_OR_JUDGES = {"compare", "curve", "webhook-format", "exit-status-of-verdict", "metrics-every"}


def test_every_option_that_takes_a_file_or_has_a_panel_of_actions_is_known_to_act_or_not() -> None:
    for verb in VERBS:
        for one in declared_by(load_verb(verb).Options):
            if isinstance(one.option, Option) and (one.type is Path or one.option.panel in {ACTIONS, METRICS}):
                assert key_of(one) in ACTING | READS_OR_JUDGES, f"{verb} --{key_of(one)}"


@pytest.mark.usefixtures("project")
def test_the_url_of_a_webhook_is_not_shown(monkeypatch, capsys) -> None:
    monkeypatch.setenv("DDPDOCTOR_WEBHOOK", "https://hooks.example.org/T0S3CR3T")
    for form in ("text", "json"):
        assert call(monkeypatch, "config", "wrap", "--format", form) == 0
        shown = capsys.readouterr().out
        assert "(set, not shown)" in shown
        assert "T0S3CR3T" not in shown


# Modules of other users


PLANTED = """
open(__file__ + ".ran", "w").close()
raise ImportError(__name__)
"""
RUNS = {
    "check-env": ("check-env",),
    "allreduce-bench": (
        "allreduce-bench", "--nproc-per-node", "2", "--max-size", "1024", "--iters", "1", "--reference", "none",
    ),
    "check-rendezvous": ("check-rendezvous", "--nnodes", "1", "--timeout", "5"),
    "wrap": ("wrap", "--nproc-per-node", "1", "--report-dir", "{run}", "{script}"),
    "wrap, an unknown option of torchrun": ("wrap", "--of-a-newer-torch", "1", "{script}"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no flag for it")
@pytest.mark.parametrize("case", RUNS)
def test_no_module_of_the_current_folder_is_run(case: str, tmp_path: Path) -> None:
    """It may be /tmp. The console script, as this flag, leaves the folder out; so must the Pythons that it starts."""
    planted, script = tmp_path / "planted", tmp_path / "elsewhere" / "train.py"
    planted.mkdir()
    for name in ("json", "torch", "pynvml", "struct", "dataclasses", "numpy", "ddpdoctor"):
        (planted / f"{name}.py").write_text(PLANTED)
    script.parent.mkdir()
    script.write_text("import json, torch\nprint('trained')\n")
    words = [word.format(run=tmp_path / "run", script=script) for word in RUNS[case]]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ddpdoctor", *words], capture_output=True, text=True, check=False, cwd=planted,
        env=clean_environment(),
    )  # fmt: skip
    assert done.returncode in {0, 1, 2, 4}, done.stderr
    assert ("trained" in done.stdout) is (case == "wrap"), done.stderr
    assert [path.name for path in planted.glob("*.ran")] == []
