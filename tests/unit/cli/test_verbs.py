"""Verbs in one process: compare, report, wrap."""

from __future__ import annotations

import contextlib
import io
import re
import resource
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.cli.report import Options, read_run, run
from ddpdoctor.cli.running import JobReports, keep_errors, outcome_report
from ddpdoctor.cli.wrap import Options as WrapOptions
from ddpdoctor.cli.wrap import prepare
from ddpdoctor.diagnose.report import make_report
from ddpdoctor.launch import placement
from ddpdoctor.launch.command_line import SplitCommand, split_command
from ddpdoctor.launch.session import JobOutcome
from ddpdoctor.launch.starting import MIN_FILES, choose_debug_level, debug_environment, notes_of
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import JobEnd
from ddpdoctor.model.findings import JobStatus, JobSummary, Judgment, Severity
from ddpdoctor.report.formats import render_json
from ddpdoctor.rules.speed.comparing import settings_of
from tests import benches
from tests.golden import Cases, words
from tests.pictures import finding
from tests.pictures import report as small_report
from tests.rules.speed.jobs import rank, state
from tests.synthetic import Job, write_folder

CASES = Cases(__name__)
test_kept = CASES.test()
RUNS = Path(__file__).parents[2] / "data" / "runs"


# `report --compare` says what changed between two runs, and why two runs cannot be compared.


def save(folder, speed, **run_data):
    """Save the report of a job in a run folder."""
    known = speed if isinstance(speed, dict) else known_of(speed)
    ranks = 2 if isinstance(speed, dict) else len(speed.ranks)
    report = make_report(
        command=("wrap", "wrap", "train.py", folder.name), started_at="2026-11-24T02:00:00Z", findings=(), checks=(),
        data={"run": {"torch_version": "2.13.0", "environment": {}, **run_data}, "speed": known},
        job=JobSummary(world_size=ranks, nnodes=1, status=JobStatus.FINISHED, exit_status=0),
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(render_json(report))
    return folder


def known_of(speed):
    return {"asked": True, "budget": encode(speed.budget), "settings": encode(settings_of(speed))}


def job(ranks=2, threads=1, **parts_ms):
    return state(*(rank(n, {**parts_ms, "data": lambda at: 1.0 + at % 3}, threads=threads) for n in range(ranks)))


def shown(first, second, **more):
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert run(Options(run_dir=first, compare=second, **more)) == 0
    return stream.getvalue()


@CASES
def comparisons(tmp_path):
    """The verdict names the phase that made the step shorter, and what else differs; a trifle is no change."""
    a = {"environment": {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"}}
    b = {"torch_version": "2.12.0", "environment": {"NCCL_DEBUG": "WARN", "X_NEW": "1"}}
    pairs = {
        "shorter": ((job(exposed=31.0), {}), (job(exposed=8.0), {})), "by less than the noise": ((job(), {}),) * 2,
        "a certain trifle": ((state(rank(0)), {}), (state(rank(0, {"forward": 32.5})), {})),
        "other ranks and settings": ((job(), a), (job(ranks=4, threads=2), b)),
    }  # fmt: skip
    found = {}
    for title, both in pairs.items():
        first, second = (
            save(tmp_path / title / name, one, **more) for name, (one, more) in zip("ab", both, strict=True)
        )
        found[title] = shown(first, second).replace(str(tmp_path), "")
    first, second = (tmp_path / "shorter" / name for name in "ab")
    found["csv"] = shown(first, second, format="csv")
    markdown = shown(first, second, format="markdown").partition("\nddpdoctor ")[0]
    found["markdown"] = markdown.replace(str(tmp_path).replace("_", r"\_"), "")
    assert "a step of B is 18%" in shown(first, second, format="html")
    saved = tmp_path / "compared.json"
    saved.write_text(shown(first, second, format="json"))
    again = shown(saved, None).replace(str(tmp_path), "").splitlines()
    return found | {"shown again": [one for one in again if one not in found["shorter"].splitlines()]}


def without_blocks():
    known = job()
    return {"budget": encode(replace(known.budget, blocks_ms=()))}


def test_what_is_no_other_run_or_has_no_budget_is_refused(tmp_path):
    a = save(tmp_path / "a", job())
    bench = tmp_path / "bench.json"
    bench.write_text(render_json(benches.everything()))
    few = {"reason": "19 steps are too few: at least 20 are needed"}
    for other, said in (
        (a, "are the same run"), (a / "report.json", "are the same run"), (tmp_path / "none", "does not exist"),
        (bench, "it is not a run of `ddpdoctor wrap`"),
        (save(tmp_path / "few", few), "few.*has no time budget: 19 steps are too few"),
        (save(tmp_path / "no_blocks", without_blocks()), "no_blocks.*has no variation of its steps"),
        (save(tmp_path / "odd", {"budget": {"phases": 3}}), "odd.*the time budget in the report cannot be read"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said) as refused:
            run(Options(run_dir=a, compare=other))
        assert refused.value.status == 2


# A report is read from what the user names, and never from where a folder's own links lead.


@pytest.fixture
def saved(tmp_path):
    file = tmp_path / "saved" / "report.json"
    file.parent.mkdir()
    file.write_text(render_json(benches.everything()))
    return file


def test_a_link_that_the_user_names_is_followed(saved, tmp_path):
    (tmp_path / "latest").symlink_to("saved")
    (tmp_path / "latest.json").symlink_to("saved/report.json")
    assert read_run(tmp_path / "latest") == read_run(tmp_path / "latest.json") == read_run(saved)


def test_a_link_in_the_folder_is_not_followed(saved, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").symlink_to(saved)
    with pytest.raises(UserError, match="it is a link") as refused:
        read_run(tmp_path / "run")
    assert refused.value.status == 2


@pytest.mark.parametrize("part", ["rings", "evidence"])
def test_a_part_of_the_folder_that_is_a_link_is_damage(part, tmp_path):
    write_folder(tmp_path / "run", Job(world=4, steps=3, situation="stuck", tp=2))
    (tmp_path / "run" / part).rename(tmp_path / part)
    (tmp_path / "run" / part).symlink_to(tmp_path / part)
    with pytest.raises(UserError, match=f"is damaged: {part} in it is not a folder, or is a link"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"schema_version": ' + "1" * 5000 + "}", "[" + "{}," * 2_000_000 + "0]", "\ud800"],
    ids=["deep", "digits", "many", "surrogate"],
)
def test_json_that_no_report_has_is_a_clear_error(text, tmp_path):
    file = tmp_path / "report.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match="the report cannot be read"):
        read_run(file)


def test_the_ranks_of_a_ring_that_is_a_link_say_so(tmp_path):
    write_folder(tmp_path / "run", Job(world=4, steps=3, situation="stuck", tp=2))
    ring = sorted((tmp_path / "run" / "rings").iterdir())[2]
    ring.rename(tmp_path / "moved")
    ring.symlink_to(tmp_path / "moved")
    report = read_run(tmp_path / "run")
    found = [(one.ranks, one.summary) for one in report.findings if one.code == "DD901"]
    assert len(found) == 1
    assert found[0][0] == (2,)
    assert "it is a link" in found[0][1]


def test_a_report_is_written_to_a_file_in_any_format(saved, tmp_path, capsys):
    for form, begins in (("html", "<!DOCTYPE html>"), ("markdown", "## ddpdoctor"), ("json", "{")):
        file = tmp_path / f"report.{form}"
        assert run(Options(run_dir=saved, format=form, output=file)) == 0
        assert file.read_text().startswith(begins)
    assert capsys.readouterr() == ("", "")


def test_two_outputs_to_one_file_are_refused(saved, tmp_path):
    page = tmp_path / "page.html"
    with pytest.raises(UserError, match="--plot and --output are both"):
        run(Options(run_dir=saved, format="html", output=page, plot=page))


@pytest.fixture
def browser(tmp_path, monkeypatch):
    """Return the file in which the user's browser leaves what it was asked to open."""
    opened, program = tmp_path / "opened", tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    program.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{program} %s")
    return opened


def test_a_page_is_opened_in_the_browser(saved, tmp_path, browser, capsys):
    for file in (tmp_path / "page.html", None):
        assert run(Options(run_dir=saved, output=file, opens=True)) == 0
        page = Path(capsys.readouterr().err.rpartition(" ")[2].strip())
        assert browser.read_text().strip() == page.as_uri()
        assert page.read_text().startswith("<!DOCTYPE html>")
        assert file is None or page == file


def test_without_a_browser_the_page_is_named(saved, tmp_path, monkeypatch, capsys):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert run(Options(run_dir=saved, output=tmp_path / "page.html", opens=True)) == 0
    assert f"no browser could be opened; the page is {tmp_path}/page.html" in capsys.readouterr().err


def test_only_a_page_can_be_opened(saved):
    with pytest.raises(UserError, match="--open needs a page, which --format json is not"):
        run(Options(run_dir=saved, format="json", opens=True))


# The debug level, and what --quiet leaves.


def environment_of(level):
    """The variable of a level that was set before; none of it is not set."""
    return {} if level is None else {"TORCH_DISTRIBUTED_DEBUG": level}


def environment_with(row):
    level, is_command, has_gpu = row
    return debug_environment(environment_of("before"), level, is_command=is_command, has_gpu=has_gpu)


def chosen_level(row):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft if len(row) == 2 else MIN_FILES - 1, hard))
    try:
        return choose_debug_level(row[0], environment_of(row[1]), alone=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def notes_before(row):
    note, chosen, environment = row
    options = placement.WrapOptions(
        split=SplitCommand(script="train.py"), on_hang="auto", report_dir=Path("r"), report_file=Path("r/report.json"),
        command=(), placement=placement.Placement(note=note), **{"hang_timeout_s": 300.0, **chosen},
    )  # fmt: skip
    return list(notes_of(options, environment_of(environment)))


test_words = words(
    __name__, choose_debug_level=chosen_level, notes_before=notes_before, debug_environment=environment_with
)


def test_quiet_leaves_errors_only_and_nothing_of_warnings():
    findings = [finding(f"DD60{n}", severity=one) for n, one in enumerate(Severity)]
    error, *others = sorted(findings, key=lambda one: one.severity is not Severity.ERROR)
    assert keep_errors(small_report(error, *others)) == small_report(error)
    assert keep_errors(small_report(*others)) is None


@pytest.fixture
def prepared(tmp_path):
    """Prepare a job whose page goes to this file."""
    script = tmp_path / "train.py"
    script.write_text("")

    def make(page):
        return prepare(
            WrapOptions(
                hang_timeout_s=60.0, split=split_command([str(script)], {}), report_dir=tmp_path / "run", html=page
            ),
            {},
        )

    return make


def test_a_page_goes_where_its_report_goes_and_is_withdrawn_with_it(prepared, tmp_path):
    page = tmp_path / "page.html"
    options = prepared(page)
    for file in (page, options.report_file):
        file.write_text("")
    reports = JobReports(options=options, make=outcome_report, goes_on="")
    reports.withdraw(Judgment(findings=(), checks=(), certain=False))
    assert not page.exists()
    assert not options.report_file.exists()


def test_what_was_printed_while_the_job_ran_is_taken_back_if_the_end_does_not_have_it(prepared, tmp_path, capsys):
    with tarfile.open(RUNS / "drift.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    options = prepared(None)
    drift = finding("DD501", "param-drift")
    end = JobEnd(hung=False, interrupted=False, exit_status=0, started_at="", ended_at="")
    nothing = Judgment(findings=(), checks=(), certain=False)
    ended = JobOutcome(folder=tmp_path, run_dir=tmp_path, judgment=nothing, end=end, failure=None)
    for found, taken_back in (((drift,), 0), ((), 1)):
        reports = JobReports(options=options, make=lambda _, found=found: small_report(*found), goes_on="")
        for said in (frozenset(), frozenset({"DD501"})):  # a line for a code, once
            reports.report_replicas(tmp_path / "drift", said)
        live = capsys.readouterr().err
        assert live.startswith("ddpdoctor: interim: DD501 param-drift, rank")
        assert live.endswith("; training continues, and the report at the end is final\n")
        assert live.count("ddpdoctor: ") == 1
        reports.show(ended)
        final = re.findall(r"ddpdoctor: final: DD501 param-drift, .* does not hold at the end", capsys.readouterr().err)
        assert len(final) == taken_back


def test_a_page_that_cannot_be_written_is_refused_before_the_run_folder_is_made(prepared, tmp_path):
    with pytest.raises(UserError, match=r"--html .* cannot be written"):
        prepared(tmp_path / "missing" / "page.html")
    assert not (tmp_path / "run").exists()
