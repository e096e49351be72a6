"""The command line as a user meets it: help, exit statuses, streams, errors without a traceback."""

import json
import os
from pathlib import Path

import pytest

from tests import forking

ROOT = Path(__file__).parents[2]


def write_report(folder, **changes):
    body = {
        "schema_version": 1,
        "tool": {"name": "ddpdoctor", "version": "0.1.0"},
        "command": ["ddpdoctor", "wrap", "train.py"],
        "started_at": "2026-01-02T03:04:05Z",
        "ended_at": "2026-01-02T03:04:06Z",
        "job": {"world_size": 2, "nnodes": 1, "status": "finished", "exit_status": 0},
        "verdict": None,
        "findings": [],
        "checks": [],
        "ranks": [],
        "data": {},
    }
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps({**body, **changes}))
    return folder


def test_help_names_every_verb_on_stdout(run):
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert all(f"\n  {verb} " in done.stdout for verb in ("check-env", "wrap", "demo", "report", "explain"))


def test_help_imports_nothing_heavy(run):
    done = run("--help", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "rich", "psutil", "pynvml", "numpy", "pydantic"}


@pytest.mark.parametrize("args", [("explain", "DD601"), ("report", "run")])
def test_what_only_shows_something_imports_nothing_heavy(run, tmp_path, args):
    write_report(tmp_path / "run")
    done = run(*args, PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert not imported & {"torch", "psutil", "pynvml", "numpy"}


def test_help_loads_no_verb(run):
    done = run("--help", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not [
        name for name in imported if name.startswith(("ddpdoctor.cli.check_", "ddpdoctor.cli.wrap", "ddpdoctor.launch"))
    ]


def test_help_of_wrap_names_each_option_and_its_variable(run):
    done = run("wrap", "--help")
    assert done.returncode == 0
    for option in ("hang-timeout", "on-hang", "debug-level", "report-dir", "format", "quiet", "ignore"):
        assert f"--{option}" in done.stdout
        assert f"DDPDOCTOR_{option.upper().replace('-', '_')}" in done.stdout


@pytest.mark.parametrize("args", [("-h",), ("--tee", "3", "--help"), ("--quiet", "--help", "train.py")])
def test_help_before_the_script_is_that_of_wrap(run, args):
    done = run("wrap", *args)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ddpdoctor wrap [OPTIONS] [TORCHRUN OPTIONS] SCRIPT")


@pytest.mark.parametrize("verb", ["wrap", "check-env", "allreduce-bench", "report"])
def test_help_has_a_short_option_and_examples_whose_options_there_are(run, verb):
    shown = run(verb, "-h").stdout
    _, _, examples = shown.partition("Examples:\n")
    given = {word.partition("=")[0] for line in examples.splitlines() for word in line.split() if word[:2] == "--"}
    assert f"ddpdoctor {verb}" in examples
    others = {"--", "--ntasks-per-node", "--nproc-per-node", "--epochs"}  # srun's, torchrun's and the script's
    assert not [option for option in given - others if option not in shown.partition("Examples:")[0]]


def test_help_of_wrap_names_torchruns_options_whole(run):
    assert {"--rdzv-conf", "--max-restarts", "--duplicate-stdout-filters"} <= set(run("wrap", "-h").stdout.split())


def test_completion_is_there_for_a_shell(run):
    # Typer looks for a shell among the parents of the process, and a test may have none.
    done = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_DDPDOCTOR_COMPLETE=complete_bash" in done.stdout


def test_the_latest_run_is_shown_where_none_is_named(run, tmp_path):
    parent = tmp_path / "ddpdoctor-report"
    parent.mkdir()
    for age, name in ((50, "20260102-030405-new"), (90, "20260102-030406-old")):
        folder = write_report(parent / name, command=["ddpdoctor", "wrap", f"{name}.py"])
        at = folder.stat().st_mtime - age
        os.utime(folder, (at, at))
    assert "20260102-030405-new" in run("report").stdout


def test_version(run):
    from ddpdoctor import __version__

    assert run("--version").stdout == f"ddpdoctor {__version__}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("wrap",), "no script"),
        (("wrap", "gone.py"), "gone.py was not found"),
        (("wrap", "."), "is a directory"),
        (("wrap", "bad.py"), "bad.py:2"),
        (("wrap", "--hang-timeout", "0", "ok.py"), "--hang-timeout is '0'"),
        (("wrap", "--on-hang", "dance", "ok.py"), "--on-hang"),
        (("wrap", "--debug-level", "LOUD", "ok.py"), "--debug-level"),
        (("wrap", "--format", "xml", "ok.py"), "--format"),
        (("wrap", "--ignore", "DD999", "ok.py"), "DD999"),
        (("wrap", "--tee"), "--tee needs a value"),
        (("wrap", "--report-dir", "ok.py/x", "ok.py"), "not writable"),
        (("report",), "there is no run folder in ddpdoctor-report/"),
        (("wrap", "--quiet", "torchrun", "ok.py"), "`ddpdoctor wrap --quiet -- torchrun ok.py`"),
        (("wrap", "--nproc-per-node=2", "torchrun", "ok.py"), "-- torchrun --nproc-per-node=2 ok.py`"),
        (("report", "gone"), "there is no gone"),
        (("report", "."), "not a run folder"),
        (("report", "ok.py"), "cannot be read"),
        (("report", "--format", "xml", "."), "--format"),
        (("explain",), "no code"),
        (("explain", "DD60"), "Did you mean"),
        (("explain", "stack"), "DD601 (stuck)"),
        (("demo", "dance"), "exit-hang"),
        (("dance",), "dance"),
    ],
)
def test_wrong_use_is_status_2_said_on_stderr_and_nothing_is_started(run, tmp_path, args, said):
    (tmp_path / "ok.py").write_text("open('started', 'w')\n")
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    done = run(*args)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"ok.py", "bad.py"}


def test_an_option_may_come_from_the_environment(run, tmp_path):
    (tmp_path / "ok.py").write_text("")
    done = run("wrap", "ok.py", DDPDOCTOR_HANG_TIMEOUT="soon")
    assert done.returncode == 2
    assert "'soon'" in done.stderr


def test_a_saved_report_is_drawn_on_stdout(run, tmp_path):
    folder = write_report(tmp_path / "run")
    for path in (folder, folder / "report.json"):
        done = run("report", path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "ddpdoctor: no problem found\n  finished, 2 ranks; report in run\n"


def test_a_saved_report_as_json_is_what_was_saved(run, tmp_path):
    folder = write_report(tmp_path / "run", data={"a": [1, 2]})
    done = run("report", folder, "--format", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((folder / "report.json").read_text())


def test_a_report_is_readable_where_the_stream_knows_ascii_only(run, tmp_path):
    rows = [{"rank": 0, "local_rank": 0, "host": "h", "pid": 1, "state": "größe [/x]", "where": None}]
    rows = [{**row, "step": None, "gpu": None, "stack": []} for row in rows]
    job = {"world_size": 1, "nnodes": 1, "status": "failed", "exit_status": 1}
    folder = write_report(tmp_path / "run", ranks=rows, job=job)
    done = run("report", folder, PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 0
    assert "gr\\xf6\\xdfe [/x]" in done.stdout


@pytest.mark.parametrize("damage", ["", "{", '{"schema_version": 7}', "\udcff\udcfe"])
def test_a_damaged_report_names_the_file(run, tmp_path, damage):
    folder = write_report(tmp_path / "run")
    (folder / "report.json").write_bytes(damage.encode("utf-8", "surrogateescape"))
    done = run("report", folder)
    assert done.returncode == 2
    assert str(folder / "report.json") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_defect_of_ours_is_status_3_and_its_traceback_goes_to_a_file(tmp_path):
    code = "import sys; from ddpdoctor.cli import app, verbs; verbs.app = lambda *_, **__: 1 / 0; app.main()"
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = forking.run("-c", code, env=env)
    assert done.returncode == 3
    assert "internal error in ddpdoctor: ZeroDivisionError" in done.stderr
    assert "Traceback (" not in done.stderr
    (saved,) = tmp_path.glob("ddpdoctor-defect-*.txt")
    assert str(saved) in done.stderr
    assert "ZeroDivisionError: division by zero" in saved.read_text()


def test_an_interrupt_is_status_130_without_a_traceback():
    stop = "def stop(*_, **__): raise KeyboardInterrupt"
    code = f"from ddpdoctor.cli import app, verbs\n{stop}\nverbs.app = stop; app.main()"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = forking.run("-c", code, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("content", ["", "{}", '{"format": "mlflow"}'])
def test_a_foreign_folder_with_a_run_file_is_refused(run, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    done = run("report", ".")
    assert done.returncode == 2
    assert "is not a run folder" in done.stderr


def test_the_page_of_a_rule_is_found_by_code_and_by_kind(run):
    by_code, by_kind = run("explain", "dd601"), run("explain", "stuck")
    assert by_code.returncode == 0
    assert by_code.stdout.startswith("DD601 stuck (error)\n")
    assert by_code.stdout == by_kind.stdout


def test_the_list_has_a_line_a_rule_in_the_order_of_codes(run):
    codes = [line.split()[0] for line in run("explain", "--list").stdout.splitlines()]
    assert {"DD601", "DD604", "DD605"} <= set(codes)
    assert codes == sorted(codes)


def test_the_demo_lists_its_faults_with_a_description(run):
    lines = run("demo", "--list").stdout.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["stuck", "crash", "killed", "early-exit", "mismatch", "exit-hang", "stopped", "input-bound"]
    assert all(len(line.split()) > 4 for line in lines)
