"""What happens around a job: signals, death of the watcher, restarts, full disks, streams and exit status."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.running import (
    PATIENT,
    clean_environment,
    doctor,
    finish,
    free_port,
    has_called,
    job_pids,
    kill_job,
    marked_lines,
    run,
    start,
    wait_for,
    words_of,
)

pytestmark = pytest.mark.usefixtures("preloaded_python")


def until_it_trains(process: subprocess.Popen[str]) -> None:
    """Wait for so many steps that the sampler of each rank has run and the watcher has seen it."""
    assert process.stdout is not None
    for _ in range(50):
        assert process.stdout.readline() == "step\n"


def test_ctrl_c_ends_the_ranks_and_leaves_a_report(tmp_path: Path) -> None:
    process = start("endless", tmp_path, *PATIENT, ranks=2)
    until_it_trains(process)
    os.killpg(process.pid, signal.SIGINT)
    ran = finish(process, tmp_path)
    assert ran.status == 130, ran.stderr
    assert ran.report["job"]["status"] == "interrupted"
    assert ran.report["verdict"] is None
    assert job_pids(tmp_path) == []


def test_sigterm_of_a_scheduler_leaves_evidence_of_all_ranks(tmp_path: Path) -> None:
    process = start("endless", tmp_path, *PATIENT, ranks=2)
    until_it_trains(process)
    process.send_signal(signal.SIGTERM)
    ran = finish(process, tmp_path)
    assert "SignalException" in ran.stderr  # as under torchrun: the SIGTERM is the scheduler's
    assert ran.report["job"]["status"] == "interrupted"
    assert ran.report["verdict"] is None
    assert len(ran.report["ranks"]) == 2
    assert all(row["stack"] for row in ran.report["ranks"])


def test_a_killed_watcher_leaves_no_rank_and_a_readable_folder(tmp_path: Path) -> None:
    process = start("stuck_spin", tmp_path, "--hang-timeout", "600", ranks=2)
    assert wait_for(lambda: len(list((tmp_path / "rings").glob("*"))) == 2)
    assert wait_for(lambda: has_called(tmp_path, "backward"))
    process.kill()
    process.wait()
    try:
        assert wait_for(lambda: not job_pids(tmp_path))
    finally:
        kill_job(tmp_path)
    drawn = doctor("report", str(tmp_path))
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert "rank" in drawn.stdout


AUTO = ("--on-hang", "auto", "--debug-level", "OFF")


def test_a_hang_that_may_resolve_is_reported_at_once_and_stays_the_verdict_when_the_user_stops_it(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.html"
    process = start("stuck_before_init", tmp_path, *AUTO, "--html", str(page), ranks=3)
    assert wait_for((tmp_path / "report.json").exists)
    assert wait_for(lambda: page.exists() and "DD601 stuck" in page.read_text().partition("</main>")[0])
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["job"]["status"], report["verdict"]["kind"], report["verdict"]["ranks"]) == ("running", "stuck", [1])
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    ran = finish(process, tmp_path)
    assert "the job keeps running" in ran.stderr
    assert "withdrawn" not in ran.stderr
    assert ran.stderr.count("ddpdoctor explain DD601") == 1, ran.stderr  # what was shown is not shown again
    assert "interrupted, 3 ranks, exit status 1, as reported above; report in" in " ".join(ran.stderr.split())
    assert ran.report["job"]["status"] == "interrupted"
    assert (ran.report["verdict"]["kind"], ran.report["verdict"]["ranks"]) == ("stuck", [1])
    assert ran.report["verdict"]["where"][0]["line"] in marked_lines("stuck_before_init")


def test_a_rank_that_prepares_for_long_is_reported_and_the_report_is_withdrawn(tmp_path: Path) -> None:
    ran = run("clean_prepares", tmp_path, *AUTO, ranks=2, args=("python", "120"))
    assert "DD601" in ran.stderr
    assert "torch's own timeout for this barrier is 30 min" in ran.stderr
    assert ran.stderr.count("rank 0 moves again: the report of DD601 stuck is withdrawn") == 1
    assert (ran.status, ran.report["job"]["status"], ran.report["findings"]) == (0, "finished", []), ran.stderr


def test_a_rank_that_works_past_torchs_own_limit_is_named_by_the_line_of_its_work(tmp_path: Path) -> None:
    """The line at which the others gave up is evidence."""
    args = ("still", str(tmp_path / "flag"))
    ran = run("stuck_past_limit", tmp_path / "run", *AUTO, "--hang-timeout", "60", ranks=2, args=args)
    verdict = ran.report["verdict"]
    assert (ran.status, verdict["kind"], verdict["ranks"]) == (1, "stuck", [0]), ran.stderr
    assert {place["line"] for place in verdict["where"]} & set(marked_lines("stuck_past_limit")), verdict


@pytest.mark.kept
def test_an_attempt_that_was_restarted_is_a_warning(tmp_path: Path) -> None:
    ran = run("second_attempt", tmp_path, "--max-restarts", "1", *PATIENT, ranks=2)
    assert ran.report["job"]["status"] == "finished", ran.stderr
    assert ran.report["data"]["attempts"] == 2
    (finding,) = [f for f in ran.report["findings"] if f["kind"] == "crash"]
    assert (finding["severity"], finding["ranks"]) == ("warning", [1])
    assert finding["where"][0]["line"] in marked_lines("second_attempt")


@pytest.mark.kept
def test_an_abort_at_exit_is_no_failure_of_training(tmp_path: Path) -> None:
    ran = run("abort_at_exit", tmp_path, *PATIENT, ranks=2)
    assert ran.status == 1
    assert ran.report["job"]["status"] == "finished"
    assert ran.report["verdict"] is None
    (finding,) = ran.report["findings"]
    assert (finding["kind"], finding["severity"], finding["ranks"]) == ("exit-abort", "info", [1])


def test_streams_directory_arguments_and_status_are_those_of_torchrun(tmp_path: Path) -> None:
    base = [sys.executable, "-m"]
    rest = [f"--master-port={free_port()}", "--nproc-per-node=1", *words_of("echo"), "--help", "a b", "--epochs=2"]
    wrapped = [*base, "ddpdoctor", "wrap", "--quiet", "--report-dir", str(tmp_path / "run"), *rest]
    outcomes = []
    for command in ([*base, "torch.distributed.run", *rest], wrapped):
        outcomes.append(  # noqa: PERF401 - the command is long enough
            subprocess.run(
                command, capture_output=True, text=True, input="typed", cwd=tmp_path, check=False, timeout=200,
                env=clean_environment(STATUS="5"),
            )
        )  # fmt: skip
    plain, recorded = outcomes
    assert (recorded.stdout, recorded.returncode) == (plain.stdout, plain.returncode)
    assert "['--help', 'a b', '--epochs=2'] typed" in plain.stdout
    assert recorded.stderr.splitlines().count("an error line") == 1


SECRETS = ("--api-key", "hunter2", "--hf_token=hunter4", "https://me:hunter5@host/x?token=hunter6", "-p", "hunter7")


def test_secrets_stay_out_of_the_folder(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run("clean_plain", tmp_path, *PATIENT, ranks=1, args=SECRETS, WANDB_API_KEY="hunter3")
    finally:
        os.umask(before)
    text = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"clean_plain" in text
    assert b"hunter" not in text
    assert [name for name in (b"--api-key", b"--hf_token", b"me:***@") if name not in text] == []
    assert [str(path) for path in (tmp_path, *tmp_path.rglob("*")) if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("name", ["", "rings"])
def test_a_folder_with_a_planted_link_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    if name:
        folder.mkdir()
    (folder / name).symlink_to(outside)
    ran = run("clean_plain", folder, ranks=1)
    assert (ran.status, ran.stdout, outside.exists()) == (2, "", False)
    assert "is a link to" in ran.stderr
    assert "Nothing was started" in ran.stderr


ONE_FAILS = """
import json, os, time
if os.environ["RANK"] == "0":
    time.sleep(600)
if "OWN" in os.environ:
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": "the script's own word", "timestamp": 1}, file)
raise ValueError("bad sample 17")
"""


@pytest.mark.parametrize(
    ("env", "line"),
    [({}, "traceback : DD604 crash (ddpdoctor): rank 1 raised ValueError"), ({"OWN": "1"}, "the script's own word")],
)
def test_torchruns_closing_block_has_the_verdict_and_is_kept_in_a_file(
    env: dict[str, str], line: str, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(ONE_FAILS)
    ran = run(script, tmp_path / "run", *PATIENT, ranks=2, **env)
    block = (tmp_path / "run" / "torchrun.log").read_text().partition("Root Cause")[2].partition("=====")[0]
    assert line in block, ran.stderr
    assert "ValueError: bad sample 17\nddpdoctor: rank 1 raised ValueError" in ran.stderr
    assert not any(word in ran.stderr for word in TORCHRUNS)


TORCHRUNS = ("torch/distributed/elastic", "Root Cause", "ChildFailedError", "SignalException")


def test_torchruns_own_words_are_shown_if_there_is_no_verdict(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(ONE_FAILS)
    ran = run(script, tmp_path / "run", *PATIENT, "--ignore", "DD604", ranks=2)
    before, _, _ = ran.stderr.partition("ddpdoctor: no cause found")
    assert (ran.status, ran.report["verdict"]) == (1, None)
    assert before.endswith((tmp_path / "run" / "torchrun.log").read_text())
    assert all(word in before for word in TORCHRUNS[:3])


@contextlib.contextmanager
def small_disk(folder: Path, limit: str) -> Iterator[Path]:
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "tmpfs", str(folder)], check=False).returncode
    ):
        pytest.skip("a small file system needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_from_the_start_costs_the_record_not_the_job(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "size=256k") as small:
        ran = run("clean_groups", small / "run", *PATIENT, TMPDIR=str(small))
        assert ran.status == 0, ran.stderr
        assert ran.report["verdict"] is None
        assert [f["code"] for f in ran.report["findings"]] == ["DD901"]


def test_a_record_that_has_no_room_is_kept_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    with small_disk(tmp_path / "small", "nr_inodes=4") as small:
        ran = run("crash_exit_status", small / "run", *PATIENT, ranks=2, TMPDIR=str(tmp_path / "temporary"))
        verdict = ran.report["verdict"]
    (record,) = (tmp_path / "temporary").glob("ddpdoctor-*")
    assert (verdict["kind"], verdict["where"][0]["line"]) == ("crash", marked_lines("crash_exit_status")[0]), ran.stderr
    assert f"is full. The record of this run is in {record}" in ran.stderr
    assert "DD604 crash, rank 1" in doctor("report", str(record)).stdout


def test_a_disk_that_fills_up_later_costs_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "size=12m") as small:
        ran = run("fills_disk", small / "run", ranks=2, FILL=str(small / "big"))
        assert (ran.status, ran.report["verdict"]["kind"], ran.report["verdict"]["ranks"]) == (124, "stuck", [1]), (
            ran.stderr
        )
        assert ran.report["verdict"]["where"][0]["line"] in marked_lines("fills_disk")


def test_on_a_disk_that_stays_full_the_verdict_is_on_the_screen(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    with small_disk(tmp_path / "small", "size=12m") as small:
        where = {"FILL": str(small / "big"), "AGAIN": "1", "TMPDIR": str(tmp_path / "temporary")}
        ran = run("fills_disk", small / "run", ranks=2, **where)
    assert ran.status == 124, ran.stderr
    assert f"life.py:{marked_lines('fills_disk')[0]}" in ran.stderr
    assert "the report could not be saved" in ran.stderr
    assert not any(word in ran.stderr for word in TORCHRUNS)  # the SIGTERM is ours, and there is no room for the file
    (record,) = (tmp_path / "temporary").glob("ddpdoctor-*")
    report = json.loads((record / "report.json").read_text())
    assert (report["verdict"]["kind"], report["verdict"]["ranks"]) == ("stuck", [1])


@pytest.mark.kept
def test_a_node_that_never_comes_is_reported_and_the_others_are_stopped(tmp_path: Path) -> None:
    ran = run("clean_groups", tmp_path, "--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", ranks=2)
    assert (ran.report["verdict"]["kind"], ran.report["verdict"]["ranks"]) == ("missing", [2, 3]), ran.stderr
    assert (ran.report["job"]["status"], ran.status) == ("hung", 124)


def test_a_module_runs_as_one_and_its_line_is_named(tmp_path: Path) -> None:
    package = tmp_path / "project" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\n\n\ndef main():\n    raise LookupError(sys.argv[1])\n\n\nmain()\n")
    done = doctor(
        "wrap", "--nproc_per_node", "1", f"--master_port={free_port()}", "--report-dir", tmp_path / "run",
        "--format", "json", "-m", "package.train", "--lr=0.1", cwd=package.parent,
    )  # fmt: skip
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["verdict"]["kind"], report["verdict"]["where"][0]["line"]) == ("crash", 5)
    assert "--lr=0.1" in report["verdict"]["summary"]
    assert done.returncode == 1
    assert json.loads(done.stderr[done.stderr.index('{\n  "schema_version"') :]) == report


def test_nan_is_said_once_while_the_job_runs(tmp_path):
    options = ("--debug-level", "OFF", *PATIENT)
    ran = run("nonfinite_input", tmp_path / "run", *options, ranks=2, args=("80",))
    said = [line for line in ran.stderr.splitlines() if "training continues" in line]
    assert len(said) == 1, ran.stderr
    assert said[0].startswith("ddpdoctor: interim: DD504 nonfinite-grad, rank 0")
    assert ran.report["verdict"]["code"] == "DD504"


# A command whose output nobody reads ends as it would otherwise, and a job runs to its end.


SCRIPT = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('ran')\n"


def ddpdoctor(*words):
    return [sys.executable, "-m", "ddpdoctor", *map(str, words)]


@pytest.fixture
def job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return ddpdoctor("wrap", "--nproc-per-node=1", "--report-dir", tmp_path / "run", script, tmp_path / "ran")


def test_a_job_runs_where_streams_are_closed(job, tmp_path):
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *job], check=False, env=clean_environment())
    assert done.returncode == 0
    assert (tmp_path / "ran").read_text() == "ran"
    assert (tmp_path / "run" / "report.json").exists()


def unread(command):
    """Run a command whose stdout and stderr are a pipe that nobody reads; return its exit status."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(command, check=False, stdout=writing, stderr=writing, env=clean_environment()).returncode
    finally:
        os.close(writing)


def test_a_job_runs_where_nobody_reads_what_is_said(job, tmp_path):
    assert unread(job) == 0
    assert (tmp_path / "ran").read_text() == "ran"
    assert (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(("words", "status"), [(("explain", "DD601"), 0), (("explain", "nothing"), 2)])
def test_a_verb_ends_with_its_status_where_nobody_reads_it(words, status):
    assert unread(ddpdoctor(*words)) == status
