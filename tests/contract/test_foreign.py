"""What comes from elsewhere shows nothing of this machine: run folders, logs, dumps and reports that name its files."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.cli.mcp import answer
from ddpdoctor.cli.output import render
from ddpdoctor.collect.run import read_job
from ddpdoctor.collect.run_files import records_own_job
from ddpdoctor.diagnose.job import build_report, judge_job, running_report
from ddpdoctor.model.facts import JobEnd
from ddpdoctor.report.formats import parse_report, render_json
from ddpdoctor.report.text import render_text
from tests import benches, flight_dumps, synthetic

SECRET = "correct-horse-battery"
ROOT = Path(__file__).parents[2]
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


@pytest.mark.full
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
    agents = [answer(tool, {**given, "with_data": True}) for tool, given in (
        ("report", {"run_dir": str(folder)}), ("analyze", {"paths": [str(folder)]}),
    )]  # fmt: skip
    assert [told["body"]["verdict"]["where"][0]["file"] for told in agents] == [str(file)] * 2
    assert SECRET not in json.dumps(agents)
    assert str(file) in shown[1].stdout  # it is the line of the verdict, so it would be shown
    assert json.loads(shown[1].stdout)["data"]["source"] is None


@pytest.mark.full
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


@pytest.mark.parametrize(
    ("named", "shows"), [("{folder}", True), ("elsewhere", True), ("{folder}/rings", False), (None, False)]
)
def test_a_dump_of_a_running_job_shows_lines_only_if_a_rank_records_in_that_folder(tmp_path, file, named, shows):
    """A folder from elsewhere may hold the numbers of any processes of this machine."""
    folder = make_run(tmp_path / "elsewhere")
    variable = {} if named is None else {"DDPDOCTOR_RUN": named.format(folder=folder)}
    rank = subprocess.Popen(["sleep", "1000"], cwd=tmp_path, env={**os.environ, **variable})
    try:
        while not Path(f"/proc/{rank.pid}/environ").read_bytes():  # the kernel fills it a moment after exec
            pass
        job = read_job(folder)
        shown = records_own_job(folder, [2**22 + 1, rank.pid])
        report = running_report(folder, 1.0)
    finally:
        rank.kill()
        rank.wait()
    assert shown is shows
    assert (job.ranks[0].pid, report.verdict.where[0].file) == (100_000, str(file))
    assert SECRET not in render_json(report)  # no process with the numbers in the folder records there


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


HOSTILE = (
    "::error file=a::b", "x\n::set-env name=A::b", "##vso[task.complete]", "##[group]x",
    "##teamcity[publishArtifacts '/etc/passwd']", "\x1b]0;t\x07\x1b[31m",
    "\u202eleft\u2066", "a\rb\x9b1m", "</style><script>alert(1)</script>", "![x](http://evil/p.png) [x](javascript:y)",
)  # fmt: skip
OBEYED = re.compile(
    r"^\s*::(error|set-env)|##(vso|teamcity)?\[|[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", re.MULTILINE
)
"""What a terminal or the runner of a CI service acts on."""
TEXTS = frozenset({
    "summary", "evidence", "fix", "file", "function", "host", "hosts", "state", "reason", "command", "said", "tensor",
})  # fmt: skip
"""Fields of a report that are collected texts."""


def poison(value, texts, key=""):
    if isinstance(value, dict):
        return {name: poison(item, texts, name) for name, item in value.items()}
    if isinstance(value, list):
        return [poison(item, texts, key) for item in value]
    return next(texts) if isinstance(value, str) and key in TEXTS else value


@pytest.mark.full
@pytest.mark.parametrize("made", ["hung", "bench"])
def test_a_hostile_report_acts_on_no_terminal_runner_or_page(run, tmp_path, made):
    if made == "bench":
        plain = json.loads(render_json(benches.everything()))
    else:
        plain = json.loads(run("report", make_run(tmp_path / "run"), "--format", "json").stdout)
    for shift in range(len(HOSTILE)):
        texts = itertools.cycle(HOSTILE[shift:] + HOSTILE[:shift])
        (tmp_path / f"{shift}.json").write_text(json.dumps(poison(plain, texts)))
        report = parse_report((tmp_path / f"{shift}.json").read_text())
        drawn = {form: render(report, form) for form in ("json", "markdown", "html")}
        drawn["text"] = render_text(report, width=40, color=False, run_dir=None, verbose=True)
        assert {form: OBEYED.findall(text) for form, text in drawn.items() if OBEYED.search(text)} == {}
        prose = re.sub(r"^    .*$", "", drawn["markdown"], flags=re.MULTILINE)  # the rest is code
        assert "<script>alert" not in drawn["html"] + prose
        assert not re.search(r"(?<!\\)\[x(?<!\\)\]\(", prose)
        assert parse_report(drawn["json"]) == report  # nothing is lost
    done = run("report", "0.json", "--format", "markdown")
    assert (done.returncode, OBEYED.findall(done.stdout + done.stderr)) == (0, [])


@pytest.mark.full
def test_a_hostile_log_acts_on_no_terminal_or_runner(run, tmp_path):
    quoted = [text.replace("\n", " ") for text in HOSTILE]
    log = "".join(
        f'[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File "{text}/a.py", line 3, in f\n'
        f"[rank{rank}]: ValueError: {text} \n{text}\n"
        for rank, text in enumerate(quoted)
    )
    (tmp_path / "train.log").write_text(log)
    for form in ("text", "json", "markdown", "html"):
        done = run("analyze", "train.log", "--format", form)
        assert OBEYED.findall(done.stdout + done.stderr) == []
        assert "ValueError" in done.stdout


@pytest.mark.full
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux, as tests may run as root")
def test_what_a_user_may_not_read_is_noted_or_a_clear_error(tmp_path):
    left = tmp_path / "left"
    (left / "closed").mkdir(parents=True)
    (left / "train.log").write_text("[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad\n")
    (left / "secret.log").write_text("[rank2]: ValueError: bad\n")
    (left / "secret.log").chmod(0)
    (left / "closed").chmod(0)
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []

    def run_as_user(*words):
        command = [*without, sys.executable, "-m", "ddpdoctor", *map(str, words)]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert "internal error" not in done.stderr
        return done

    done = run_as_user("analyze", left, "--format", "json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["verdict"]["ranks"]) == (1, [1])
    assert sorted(told["data"]["evidence"]["not_read"]) == [
        f"{left}/closed: the folder cannot be read: Permission denied", f"{left}/secret.log: Permission denied",
    ]  # fmt: skip
    for words in (("analyze", left / "closed"), ("report", left / "closed"), ("history", left / "closed"),
                  ("status", left / "closed"), ("analyze", left / "secret.log")):  # fmt: skip
        assert run_as_user(*words).returncode == 2
