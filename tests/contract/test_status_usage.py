"""Wrong use of ``status`` and ``history`` is status 2, with what to do instead; nothing is written."""

import json

import pytest


def make_run(folder, **changes):
    folder.mkdir(parents=True)
    body = {"format": "ddpdoctor-run", "version": 1, "host": "elsewhere", "started_at": "2026-01-02T03:04:05+00:00"}
    (folder / "run.json").write_text(json.dumps({**body, **changes}))
    return folder


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("status",), "there is no run folder in ddpdoctor-report/ here"),
        (("status", "gone"), "there is no gone"),
        (("status", "."), ". is not the run folder of a job under `ddpdoctor wrap`"),
        (("status", "damaged"), "run.json is damaged"),
        (("status", "older"), "has version 99"),
        (("status", "damaged", "--watch", "--dump"), "--watch and --dump exclude each other"),
        (("status", "--watch", "--every", "0"), "--every is '0'"),
        (("status", "--format", "xml"), "--format"),
        (("status", "foreign", "--dump"), "the job was started on elsewhere"),
        (("history",), "there is no folder ddpdoctor-report"),
        (("history", "gone"), "there is no folder gone"),
        (("history", "empty"), "there is no run folder of a job in empty that can be read"),
        (("history", "damaged"), "run.json is damaged"),
        (("history", "--format", "csv"), "--format"),
    ],
)
def test_wrong_use_is_status_2_with_what_to_do(run, tmp_path, args, said):
    make_run(tmp_path / "damaged", nproc="many")
    make_run(tmp_path / "older", version=99)
    make_run(tmp_path / "foreign")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = run(*args)

    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("args", [("status",), ("status", "gone"), ("status", ".")])
def test_of_a_job_that_nobody_wrapped_attach_is_named(run, args):
    assert "`ddpdoctor attach` says what it does" in run(*args).stderr


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
