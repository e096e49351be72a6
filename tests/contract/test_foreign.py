"""What comes from elsewhere shows nothing of this machine: run folders, logs, dumps and reports that name its files."""

import json
import os

import pytest

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.diagnose.build import build_report
from ddpdoctor.diagnose.progress import judge_job
from ddpdoctor.model.run import JobEnd
from ddpdoctor.report.formats.json_format import parse_report
from tests import flight_dumps, synthetic

SECRET = "correct-horse-battery"
HERE = os.uname().nodename
END = JobEnd(hung=True, interrupted=False, exit_status=124, started_at="2099-01-01T00:00:00+00:00", ended_at="")


def lines(text):
    return "".join(f"# {text} {number}\n" for number in range(1, 101))


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of this machine, older than any run, that what comes from elsewhere names as the script of a job."""
    file = tmp_path / "home" / "secret.py"
    file.parent.mkdir()
    file.write_text(lines(SECRET))
    os.utime(file, (10**9, 10**9))
    monkeypatch.setattr(synthetic, "SCRIPT", str(file))
    monkeypatch.setattr(flight_dumps, "SCRIPT", str(file))
    return file


def make_run(folder, situation="stuck", **run):
    synthetic.write_folder(folder, synthetic.Job(world=4, steps=20, situation=situation))
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(
        json.dumps({**about, "host": HERE, "started_at": "2099-01-01T00:00:00+00:00", **run})
    )
    return folder


def make_log(path, file):
    path.write_text(
        "[rank1]: Traceback (most recent call last):\n"
        f'[rank1]:   File "{file}", line 8, in <module>\n[rank1]:     main()\n'
        f'[rank1]:   File "{file}", line 4, in main\n[rank1]:     int("x")\n'
        "[rank1]: ValueError: invalid literal for int() with base 10: 'x'\n"
    )
    return path


@pytest.mark.parametrize("situation", ["stuck", "crash"])
def test_a_run_folder_shows_no_file_of_this_machine(run, tmp_path, file, situation):
    folder = make_run(tmp_path / "runs" / "elsewhere", situation)
    (folder / "source.json").symlink_to(file)  # nor by a link in the place of what is kept
    other = make_run(tmp_path / "runs" / "another", situation)
    shown = [
        *(run("report", folder, "--format", form) for form in ("text", "json", "markdown", "html", "sarif", "junit")),
        *(run(verb, folder) for verb in ("analyze", "history", "status")),
        run("analyze", folder, "--format", "json", "--html", "page.html"),
        run("status", folder, "--dump"),
        run("diff", folder, other),
        run("bundle", folder, "--yes", "--with-source", "-o", "kept.zip"),
        run("report", "kept.zip", "--format", "html"),
    ]
    assert [done.args for done in shown if SECRET in done.stdout + done.stderr] == []
    assert SECRET not in (tmp_path / "page.html").read_text()
    assert str(file) in shown[1].stdout  # it is the line of the verdict, so it would be shown
    assert json.loads(shown[1].stdout)["data"]["source"] is None


def test_logs_and_dumps_show_no_file_of_this_machine(run, tmp_path, file):
    left = tmp_path / "left"
    left.mkdir()
    make_log(left / "train.log", file)
    (calls := flight_dumps.Recorder(rank=0, world=2)).call("all_reduce", state="scheduled", line=9)
    flight_dumps.write(left, 0, calls.body())
    for form in ("text", "json", "markdown", "html"):
        done = run("analyze", left, "--format", form)
        assert "secret.py" in done.stdout
        assert SECRET not in done.stdout + done.stderr


def test_a_run_folder_does_not_stand_for_another_one_of_this_machine(run, tmp_path):
    make_run(tmp_path / "own", command=["train", SECRET])
    folder = make_run(tmp_path / "elsewhere")
    (folder / "record.json").write_text(json.dumps({"host": HERE, "folder": str(tmp_path / "own")}))
    assert SECRET not in run("status", folder, "--format", "json").stdout


def test_a_run_that_was_recorded_here_shows_its_lines_when_the_file_is_gone(run, tmp_path, file):
    folder = make_run(tmp_path / "own")
    job = read_job(folder)
    build_report(folder, judge_job(job), END)
    file.unlink()
    blamed = synthetic.STUCK_LINE
    for form in ("markdown", "html"):
        assert f"{SECRET} {blamed}" in run("report", folder, "--format", form).stdout
    excerpt = parse_report(run("report", folder, "--format", "json").stdout).data["source"]
    assert (excerpt["blamed"], len(excerpt["lines"])) == (blamed, 5)
