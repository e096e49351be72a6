"""The command line as a user meets it: help, exit statuses, streams, errors without a traceback, verb by verb."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jsonschema
import pytest

from ddpdoctor.cli import check_consistency, verbs
from ddpdoctor.cli.allreduce_bench import Options
from ddpdoctor.cli.options import Argument, declared_by, load_verb
from ddpdoctor.model.findings import JobStatus, JobSummary
from ddpdoctor.report.formats import report_to_dict
from tests import forking, pictures
from tests.golden import words
from tests.scenarios.running import SCHEMA, cell_of, clean_environment, free_port, grids_of

ROOT = Path(__file__).parents[2]
SAMPLES = ("check-data", "--samples", "455", "--world-size", "2", "--batch-size", "8")


def write_report(folder, **changes):
    job = JobSummary(world_size=2, nnodes=1, status=JobStatus.FINISHED, exit_status=0)
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps({**report_to_dict(pictures.report(job=job)), **changes}))
    return folder


def test_help_names_every_verb_on_stdout(run):
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert all(f"\n  {verb} " in done.stdout for verb in ("check-env", "wrap", "demo", "report", "explain"))


@pytest.mark.parametrize("args", [("-h",), ("--tee", "3", "--help"), ("--quiet", "--help", "train.py")])
def test_help_before_the_script_is_that_of_wrap(run, args):
    done = run("wrap", *args)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ddpdoctor wrap [OPTIONS] [TORCHRUN OPTIONS] SCRIPT")


@pytest.mark.parametrize("verb", ["wrap", "check-env", "allreduce-bench", "report", "check-consistency"])
def test_help_has_each_option_with_its_variable_in_80_columns_and_examples_whose_options_there_are(run, verb):
    done = run(verb, "-h", COLUMNS="80")
    shown, _, examples = done.stdout.partition("Examples:\n")
    declared = [one for one in declared_by(load_verb(verb).Options) if not isinstance(one.option, Argument)]
    names = [name for one in declared for name in (*one.names, one.option.variable) if name]
    assert (done.returncode, done.stderr) == (0, "")
    assert [name for name in names if name.partition("/")[0] not in shown] == []
    assert max(map(len, done.stdout.splitlines())) <= 80
    given = {word.partition("=")[0] for line in examples.splitlines() for word in line.split() if word[:2] == "--"}
    assert f"ddpdoctor {verb}" in examples
    others = {"--", "--ntasks-per-node", "--nproc-per-node", "--epochs"}  # srun's, torchrun's and the script's
    assert not [option for option in given - others if option not in shown]


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


def test_a_saved_report_as_json_is_what_was_saved(run, tmp_path):
    folder = write_report(tmp_path / "run", data={"a": [1, 2]})
    done = run("report", folder, "--format", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((folder / "report.json").read_text())


def test_a_report_is_readable_where_the_stream_knows_ascii_only(tmp_path):
    rows = [{"rank": 0, "local_rank": 0, "host": "h", "pid": 1, "state": "größe [/x]", "where": None}]
    rows = [{**row, "step": None, "gpu": None, "stack": []} for row in rows]
    job = {"world_size": 1, "nnodes": 1, "status": "failed", "exit_status": 1}
    folder = write_report(tmp_path / "run", ranks=rows, job=job)
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "ddpdoctor", "report", folder]
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert b"gr\\xf6\\xdfe [/x]" in done.stdout


def test_a_defect_of_ours_is_status_3_and_its_traceback_goes_to_a_file(run, tmp_path, monkeypatch):
    monkeypatch.setattr(verbs, "app", lambda *_, **__: 1 / 0)
    done = run()
    assert done.returncode == 3
    assert "internal error in ddpdoctor: ZeroDivisionError" in done.stderr
    assert "Traceback (" not in done.stderr
    (saved,) = tmp_path.glob("ddpdoctor-defect-*.txt")
    assert str(saved) in done.stderr
    assert "ZeroDivisionError: division by zero" in saved.read_text()


def test_an_interrupt_is_status_130_without_a_traceback(run, monkeypatch):
    monkeypatch.setattr(verbs, "app", mock.Mock(side_effect=KeyboardInterrupt))
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_page_of_a_rule_is_found_by_code_and_by_kind(run):
    by_code, by_kind = run("explain", "dd601"), run("explain", "stuck")
    assert by_code.returncode == 0
    assert by_code.stdout.startswith("DD601 stuck (error)\n")
    assert by_code.stdout == by_kind.stdout


def test_the_list_has_a_line_a_rule_in_the_order_of_codes(run):
    codes = [line.split()[0] for line in run("explain", "--list").stdout.splitlines()]
    assert {"DD601", "DD604", "DD605"} <= set(codes)
    assert codes == sorted(codes)


# `check-env` as a user meets it on the command line.


def test_this_machine_is_checked_without_an_error_of_ours(fork):
    done = fork("check-env", "--format", "json", "--fail-on", "never", "--skip", "xid")
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    assert done.stderr == ""
    assert [check for check in report["checks"] if check["outcome"] == "crashed"] == []
    assert "xid" not in {check["id"] for check in report["checks"]}
    assert all(
        check["seen"] if check["outcome"] in {"passed", "failed"} else check["reason"] for check in report["checks"]
    )


def test_the_list_names_each_check_with_code_and_what_it_reads(run):
    from ddpdoctor.rules.registry import rules_of

    done = run("check-env", "--list")
    lines = [line.split(None, 4) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert [line[:2] for line in lines] == [[rule.code, rule.kind] for rule in rules_of("environment")]
    assert all(len(line) == 5 for line in lines)


def test_a_saved_report_is_drawn_again(run, tmp_path):
    shown = run("check-env", "env-unknown", "--report-dir", tmp_path / "saved", NCCL_IB_TIMEOT="1")
    assert shown.stdout == run("report", tmp_path / "saved").stdout
    assert run("check-env", "env-unknown", "--report-dir", tmp_path / "saved").returncode == 2


def test_values_of_unlisted_variables_never_reach_a_report(run):
    done = run(
        "check-env", "--format", "json", "--no-torch", NCCL_MY_TOKEN="hunter2", HF_TOKEN="hunter2",
        MY_PASSWORD="hunter2",
    )  # fmt: skip
    assert "hunter2" not in done.stdout
    assert "NCCL_MY_TOKEN" in done.stdout


def test_redacted_output_names_neither_host_nor_address_nor_user(run):
    host = os.uname().nodename
    text = run(
        "check-env", "--no-torch", "-v", "--redact", "--fail-on", "never", USER="jane-doe", MASTER_ADDR="10.9.8.7"
    ).stdout
    assert not re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text)
    assert "10.9.8.7" not in text
    assert "jane-doe" not in text


# `check-consistency` as a user meets it on the command line, before any rank starts; and the public names.


@pytest.mark.parametrize(
    ("model", "message"), [("train.py", "--model is 'train.py'"), ("nowhere:build", "no module named nowhere")]
)
def test_a_model_that_is_not_there_is_reported_once_by_one_rank(fork, model, message):
    done = fork("check-consistency", "--model", model, "--nproc-per-node", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_what_is_public_is_found_and_nothing_else():
    import ddpdoctor

    named = {name: getattr(ddpdoctor, name).__name__ for name in ddpdoctor.__all__}
    assert named.pop("watch") == "Watch"
    assert all(found == name for name, found in named.items())
    assert issubclass(ddpdoctor.ConsistencyError, RuntimeError)
    with pytest.raises(AttributeError, match="no attribute 'check_everything'"):
        ddpdoctor.check_everything  # noqa: B018 - the look itself raises
    assert (Path(ddpdoctor.__file__).parent / "py.typed").exists()


@pytest.fixture
def diff(tmp_path, monkeypatch, capsys):
    """Compare files in this process, which has torch already; return the status and what was printed."""
    monkeypatch.chdir(tmp_path)

    def compare(*names, **options):
        files = tuple(map(Path, names))
        status = check_consistency.run(check_consistency.Options(files=files, diff=True, limit_s=120.0, **options))
        return status, capsys.readouterr().out

    return compare


def save(path, weight, mean):
    import torch

    state = {"0.weight": torch.full((2, 3), weight), "1.running_mean": torch.full((3,), mean)}
    torch.save({"model": state, "epoch": 1}, path)


def test_files_are_compared_without_ranks_and_the_verdict_comes_first(diff, tmp_path):
    for rank, weight in enumerate((1.0, 1.0, 1.5)):
        save(tmp_path / f"ckpt_rank{rank}.pt", weight, 0.0)
    status, reported = diff("ckpt_rank0.pt", "ckpt_rank1.pt")
    assert status == 0
    assert reported.startswith("ddpdoctor: equal in all 2 tensors")
    status, reported = diff("ckpt_rank0.pt", "ckpt_rank1.pt", "ckpt_rank2.pt", report_dir=tmp_path / "kept")
    first, *rest = reported.splitlines()
    (row,) = [line.split() for line in rest if line.startswith("  model.0.weight")]
    assert status == 1
    assert "0.weight differs in ckpt_rank2.pt" in first
    assert row == ["model.0.weight", "float32[2,", "3],", "file", "3", "against", "1", "6", "6", "0.5", "0.33"]
    report = json.loads((tmp_path / "kept" / "report.json").read_text())
    jsonschema.validate(report, SCHEMA)
    assert (report["verdict"]["code"], report["verdict"]["ranks"]) == ("DD501", [2])


def test_a_difference_is_what_was_asked_for_where_fail_on_does_not_say_otherwise(diff, tmp_path):
    save(tmp_path / "a.pt", 1.0, 0.0)
    save(tmp_path / "b.pt", 1.0, 1.0)
    assert diff("a.pt", "b.pt")[0] == 1
    assert diff("a.pt", "b.pt", fail_on="error")[0] == 0
    assert diff("a.pt", "b.pt", fail_on="never")[0] == 0


# Wrong use of check-rendezvous, an interrupted one, and a node that nobody joins: statuses, and what is said.


LIMIT_S = 250


def by_hand(port):
    return ["--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--master-port", str(port)]


@pytest.mark.full
def test_it_ends_at_once_when_it_is_interrupted():
    own = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ddpdoctor", "check-rendezvous", *by_hand(free_port())),
            *("--exchange-port", str(own), "--timeout", "600s"),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=clean_environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    wait_for_listener(own)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=200)
    # Python dies of the signal itself where it came while a dataclass was made; a shell says 130 of that too.
    assert process.returncode in {130, -signal.SIGINT}, stderr
    assert stdout == ""
    assert "Traceback" not in stderr


def wait_for_listener(port):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    pytest.fail(f"nobody listens on port {port}")


def test_a_node_that_nobody_joins_names_who_is_absent(fork, tmp_path):
    more = ("--exchange-port", str(free_port()))
    done = fork(
        "check-rendezvous", *by_hand(free_port()), *more, "--timeout", "1s", "--format", "json", "--report-dir",
        str(tmp_path),
    )  # fmt: skip
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    # By hand all nodes have the same options: an address that means each host itself is why nobody comes.
    assert report["verdict"]["kind"] == "master-loopback"
    (absent,) = [found for found in report["findings"] if found["kind"] == "rank-set"]
    assert absent["ranks"] == [1]
    assert done.returncode == 1, done.stderr
    assert json.loads((tmp_path / "report.json").read_text()) == report


# `check-data` and `check-checkpoint` as a user meets them on the command line.


DATA = """
from torch.utils.data import DataLoader, DistributedSampler
samples = [float(number) for number in range(30)]
def make():
    print("a line of the user's")
    return DataLoader(samples, 4, sampler=DistributedSampler(samples))
def fail(): raise ValueError("no such data")
"""
SAVE = """
import torch
model = torch.nn.Linear(4, 2)
torch.save(model.state_dict(), "sound.pt")
torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, "wrapped.pt")
content = open("sound.pt", "rb").read()
open("cut.pt", "wb").write(content[:-100])
"""
MODEL = "import torch\ndef build(): return torch.nn.Linear(4, 2)\n"


def plan(*more):
    return (*SAMPLES, *more)


def test_every_format_is_written_and_a_saved_report_is_drawn_again(run, tmp_path):
    report = json.loads(run(*plan("--format", "json", "--report-dir", tmp_path / "saved")).stdout)
    jsonschema.validate(report, SCHEMA)
    assert report["data"]["shares"]["unique"] == 455
    assert cell_of(grids_of(report)["samples that two ranks both get in an epoch"], "0", "1") == "1"
    said = run(*plan()).stdout
    assert run("report", "saved").stdout == said.replace("(-v shows each)", "(-v shows each); report in saved")
    assert "228" in run(*plan("--format", "markdown")).stdout
    assert "<testsuite" in run(*plan("--format", "junit")).stdout


def test_a_loader_is_asked_without_a_launcher_and_its_lines_stay_off_stdout(run, tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    done = run("check-data", "--dataset", "data:make", "--format", "json", "--epochs", 1)
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    assert done.returncode == 0
    assert "a line of the user's" in done.stderr
    assert report["data"]["drawn"]["passes"][0]["unique"] == 30


def test_checkpoints_are_distinguished(run, tmp_path):
    (tmp_path / "save.py").write_text(SAVE)
    assert forking.run("save.py", cwd=tmp_path).returncode == 0
    (tmp_path / "model.py").write_text(MODEL)
    sound = run("check-checkpoint", "sound.pt", "--model", "model:build", "--fail-on", "info")
    wrapped = run("check-checkpoint", "wrapped.pt", "--model", "model:build", "--format", "json")
    cut = run("check-checkpoint", "cut.pt")
    assert (sound.returncode, sound.stderr) == (0, "")
    assert "no problem found\n  checks: 9 passed, 2 skipped" in sound.stdout
    assert wrapped.returncode == cut.returncode == 1
    report = json.loads(wrapped.stdout)
    jsonschema.validate(report, SCHEMA)
    assert report["verdict"]["code"] == "DD713"
    assert report["verdict"]["tensor"] == "module.weight"
    assert "error  DD712 checkpoint-truncated" in cut.stdout
    (grid,) = grids_of(report).values()
    assert cell_of(grid, "read", "wrapped.pt") == "whole"


# `allreduce-bench` as a user meets it on the command line, before any rank starts.


def test_help_shows_defaults(run):
    text = " ".join(run("allreduce-bench", "--help").stdout.split())
    for default in ("1KiB", "1GiB", "30s", "all_reduce", "float32", "sum", "text", "error", "60s"):
        assert f"[default: {default}" in text


def test_readable_defaults_are_those_of_the_settings():
    from ddpdoctor.model.bandwidth import BenchSettings

    declared = {one.field: one for one in declared_by(Options)}
    shared = [name for name in BenchSettings.__slots__ if name in declared and name != "backend"]
    defaults = {name: declared[name].default for name in shared}
    readable = {name: declared[name].parse(text) if isinstance(text, str) else text for name, text in defaults.items()}
    assert readable == {name: getattr(BenchSettings(), name) for name in shared}


# Wrong use of ``status`` and ``history`` is status 2, with what to do instead; nothing is written.


def make_run(folder, **changes):
    folder.mkdir(parents=True)
    body = {"format": "ddpdoctor-run", "version": 1, "host": "elsewhere", "started_at": "2026-01-02T03:04:05+00:00"}
    (folder / "run.json").write_text(json.dumps({**body, **changes}))
    return folder


def test_a_job_of_another_host_is_shown_as_far_as_its_folder_goes(run, tmp_path):
    make_run(tmp_path / "foreign")
    done = run("status", "foreign")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ddpdoctor: the job was started on elsewhere ")
    assert json.loads(run("status", "foreign", "--format", "json").stdout)["state"] == "elsewhere"


def test_a_job_whose_wrap_is_gone_has_ended(run, tmp_path):
    import socket

    make_run(tmp_path / "mine", host=socket.gethostname(), watcher_pid=2**22 + 1, watcher_ticks=1)
    done = run("status", "mine", "--watch")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the job has ended, and its `wrap` left no word of how\n" in done.stdout
    assert "has ended" in run("status", "mine", "--dump").stderr


def test_the_latest_run_is_found_without_an_argument(run, tmp_path):
    make_run(tmp_path / "ddpdoctor-report" / "one", started_at=None)
    assert "run folder ddpdoctor-report/one\n" in run("status").stdout


# What commands print, and their statuses, in the folder that is furnished below.


def printed(request, line):
    """Run a line of variables and a command."""
    env = dict(word.split("=", 1) for word in line.split() if word[:1].isupper())
    request.getfixturevalue("furnished")
    done = request.getfixturevalue("run")(*(word for word in line.split() if not word[:1].isupper()), **env)
    assert done.stderr == ""
    return "\n".join((f"status {done.returncode}", *filter(None, done.stdout.splitlines())))


test_words = words(__name__, printed=printed)


# Wrong use of every verb.


WRONG = [
    (part.partition("\n")[0], *row.split("=> "))
    for part in (ROOT / "tests" / "data" / "wrong_use.txt").read_text().split("==== ")[1:]
    for row in part.splitlines()[1:]
]


FOREIGN = b'{"format": "mlflow"}'


@pytest.fixture
def furnished(tmp_path):
    """A folder with scripts, run folders, reports and files, of which some are good and some are not."""
    (tmp_path / "ok.py").write_text("open('started', 'w')\n")
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 and no more")
    write_report(tmp_path / "run")
    make_run(tmp_path / "damaged", nproc="many")
    make_run(tmp_path / "older", version=99)
    make_run(tmp_path / "foreign")
    (tmp_path / "empty").mkdir()
    row = {"collective": "all_reduce", "dtype": "float32", "redop": "sum", "mode": "latency", "in_place": True}
    bench = {"verb": "allreduce-bench", "results": [{**row, "size_bytes": "many"}]}
    for name, data in (("other", {}), ("bench", bench)):
        write_report(tmp_path / name, data=data)
        (tmp_path / name / "report.json").rename(tmp_path / f"{name}.json")
        (tmp_path / name).rmdir()
    (tmp_path / "broken.json").write_text("{")
    for name, texts in (("report", (b"", b"{", b'{"schema_version": 7}', b"\xff\xfe")), ("run", (b"", b"{}", FOREIGN))):
        for number, text in enumerate(texts):
            (folder := tmp_path / f"{name}{number}").mkdir()
            (folder / f"{name}.json").write_bytes(text)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "report.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(("verb", "words", "said"), WRONG, ids=[" ".join(row[:2]).strip() for row in WRONG])
def test_wrong_use_is_status_2_with_what_to_do_and_nothing_is_started(run, furnished, verb, words, said):
    before = sorted(path for path in furnished.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__")
    done = run(verb, *words.split())
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert [one for one in said.split(" || ") if one not in done.stderr] == []
    assert "Traceback" not in done.stderr
    after = sorted(path for path in furnished.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__")
    assert after == before
