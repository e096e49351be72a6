"""What can be done with the runs of real jobs afterwards: compared by `diff`, and handed on by `bundle`."""

import json
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests import forking
from tests.scenarios.running import PATIENT, clean_environment, marked_lines, run
from tests.web import Receiver

pytestmark = pytest.mark.usefixtures("preloaded_python")


def ddpdoctor(*words: object, cwd: Path):
    return forking.run("-m", "ddpdoctor", *map(str, words), cwd=cwd, env=clean_environment())


def test_a_run_that_failed_is_compared_with_one_that_worked_and_handed_on(tmp_path: Path) -> None:
    worked = run("clean_plain", tmp_path / "worked", *PATIENT, ranks=2)
    failed = run("crash_hardware", tmp_path / "failed", *PATIENT, ranks=2, NCCL_IB_DISABLE="1")

    done = ddpdoctor("diff", worked.folder, failed.folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    differs = "…plain.py clean_plain in A, …died.py crash_hardware in B, and"
    assert done.stdout.startswith(f"ddpdoctor: the runs differ in command line: {differs}")
    told = json.loads(ddpdoctor("diff", worked.folder, failed.folder, "--format", "json", cwd=tmp_path).stdout)
    names = [one["name"] for one in told["data"]["run_differences"]["differences"]]
    assert names[:3] == ["DD604 crash", "command line", "NCCL_IB_DISABLE"]

    done = ddpdoctor("bundle", failed.folder, "--yes", "-o", "run.zip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    opened = ddpdoctor("report", "run.zip", "--format", "json", cwd=tmp_path)
    verdict = json.loads(opened.stdout)["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("DD604", [1])
    assert "hunter2" not in opened.stdout


# ``history`` of a real job that torchrun restarts, and that is then started once more, as a scheduler does.


SCRIPT = "resumes"


def test_restarts_and_requeued_runs_are_one_history(tmp_path: Path) -> None:
    job, runs = tmp_path / "job", tmp_path / "runs"
    job.mkdir()
    arguments = (str(job), "2:1:raised", "4:1:killed")
    first = run(SCRIPT, runs / "first", *PATIENT, "--max-restarts=1", ranks=2, args=arguments)
    second = run(SCRIPT, runs / "second", *PATIENT, "--max-restarts=1", ranks=2, args=arguments, SAVES="")
    assert (first.status, second.status) == (1, 0)

    done = forking.run("-m", "ddpdoctor", "history", runs, "--format", "json", env=clean_environment())
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["jobs"]
    starts = found["starts"]

    assert [(Path(one["run"]).name, one["attempt"], one["status"]) for one in starts] == [
        ("first", 0, "failed"), ("first", 1, "failed"), ("second", 0, "finished"),
    ]  # fmt: skip
    assert [one["code"] for one in starts] == ["DD604", "DD605", ""]
    assert f"resumes.py:{marked_lines(SCRIPT)[0]}" in starts[0]["summary"]
    # Epochs of four batches: 0, 1 and 2; from the checkpoint 2, 3 and 4; from the next one 4 and 5.
    assert [one["steps"] for one in starts] == [12, 12, 8]
    assert [one["lost_steps"] for one in starts] == [4, 4, None]
    assert all(one["lost_s"] > 0 for one in starts[:2])
    assert starts[2]["lost_s"] is None
    assert [one["saved_step"] for one in starts] == [None, None, 8]
    assert (found["failures"], [(row["rank"], row["times"]) for row in found["returning"]]) == (2, [(1, 2)])
    assert 0 < found["between_failures_s"] < found["span_s"]

    shown = forking.run("-m", "ddpdoctor", "history", runs / "first", env=clean_environment()).stdout
    assert shown.startswith("ddpdoctor: 2 starts in ")
    assert f", 2 failures; rank 1 on {found['returning'][0]['host']} was to blame in 2 of them; mean time " in shown
    assert "\n  1: DD604 crash, rank 1: rank 1 raised ValueError in strike" in shown


# What `wrap` does with the verdict of a real job: a command, a webhook, excluded hosts, an exit status.


KEEP = """
import json, os, sys
given = {name: value for name, value in os.environ.items() if name.startswith("DDPDOCTOR_")}
with open(sys.argv[1], "w") as file:
    json.dump([given, json.load(sys.stdin)], file)
print("said by the command")
"""


def test_a_fault_of_a_machine_is_told_sent_and_excluded(tmp_path: Path) -> None:
    told, excluded = tmp_path / "told.json", tmp_path / "excluded"
    with Receiver(answers=(503, 200)) as receiver:
        ran = run(
            "crash_hardware", tmp_path / "run", *PATIENT, "--exit-status-of-verdict",
            "--on-finding", shlex.join([sys.executable, "-c", KEEP, str(told)]),
            "--webhook", receiver.url, "--exclude-file", str(excluded), ranks=2,
        )  # fmt: skip
    variables, report = json.loads(told.read_text())
    assert ran.status == 75, ran.stderr
    assert report == ran.report
    assert (variables["DDPDOCTOR_CODE"], variables["DDPDOCTOR_RANKS"]) == ("DD604", "1")
    assert variables["DDPDOCTOR_ORIGIN"] == report["verdict"]["origin"] == "machine"
    assert Path(variables["DDPDOCTOR_REPORT"]) == ran.folder / "report.json"
    assert "said by the command" in ran.stderr
    assert ran.stdout == ""

    first, second = receiver.received
    assert first == second, "the first try was answered with 503"
    assert second["verdict"]["code"] == "DD604"
    assert "hunter2" not in json.dumps(second)

    comment, host = excluded.read_text().splitlines()
    assert host == socket.gethostname()
    assert comment.startswith("# 20")
    assert "DD604 crash" in comment
