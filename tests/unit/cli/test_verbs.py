"""Verbs in one process: compare, report, wrap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.cli.report import Options, read_run, run
from ddpdoctor.cli.running import _patience_note, _withdraw, debug_note, keep_errors
from ddpdoctor.cli.wrap import Options as WrapOptions
from ddpdoctor.cli.wrap import prepare
from ddpdoctor.collect.system import System
from ddpdoctor.diagnose.job import make_report
from ddpdoctor.launch.command_line import split_command
from ddpdoctor.launch.starting import choose_debug_level, debug_environment, has_gpu_driver
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, Finding, JobStatus, JobSummary, Judgment, Report, Severity
from ddpdoctor.report.formats import render_json
from ddpdoctor.rules.speed.comparing import settings_of
from tests import benches
from tests.rules.speed.jobs import rank, state
from tests.synthetic import Job, write_folder

Save = Callable[..., Path]


# `report --compare` says what changed between two runs, and why two runs cannot be compared.


@pytest.fixture
def save(tmp_path):
    """Save the report of a job in a run folder of this name."""

    def write(name, speed, **run_data):
        known = speed if isinstance(speed, dict) else known_of(speed)
        ranks = 2 if isinstance(speed, dict) else len(speed.ranks)
        report = make_report(
            command=("wrap", "wrap", "train.py", name),
            started_at="2026-11-24T02:00:00Z",
            findings=(),
            checks=(),
            data={"run": {"torch_version": "2.13.0", "environment": {}, **run_data}, "speed": known},
            job=JobSummary(world_size=ranks, nnodes=1, status=JobStatus.FINISHED, exit_status=0),
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(render_json(report))
        return tmp_path / name

    return write


def known_of(speed):
    return {"asked": True, "budget": encode(speed.budget), "settings": encode(settings_of(speed))}


def job(ranks=2, threads=1, **parts_ms):
    return state(*(rank(n, {**parts_ms, "data": lambda at: 1.0 + at % 3}, threads=threads) for n in range(ranks)))


def shown(capsys, first, second, **more):
    assert run(Options(run_dir=first, compare=second, **more)) == 0
    return capsys.readouterr().out


def test_the_verdict_names_the_phase_that_made_the_step_shorter(save, capsys):
    text = shown(capsys, save("a", job(exposed=31.0)), save("b", job(exposed=8.0)))
    assert "ddpdoctor: a step of B is 18% (" in text
    assert "shorter than one of A: gradient reduction fell from 31.0 to 8.0 ms" in text
    rows = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert rows["gradient reduction"].endswith("shorter")
    assert rows["forward"].split()[-1] != "shorter"
    assert "no other setting that was recorded differs" in text


def test_runs_that_differ_by_less_than_the_noise(save, capsys):
    text = shown(capsys, save("a", job()), save("b", job()))
    assert "no difference larger than the noise: a step takes 101 ms in A and 101 ms in B" in text
    assert "shorter" not in text
    assert "longer" not in text


def test_a_certain_trifle_is_not_called_noise(save, capsys):
    steady = [state(rank(0)), state(rank(0, {"forward": 32.5}))]
    text = shown(capsys, save("a", steady[0]), save("b", steady[1]))
    assert "no difference of 1% or more" in text


def test_what_else_differs_is_said(save, capsys):
    a = save("a", job(), environment={"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"})
    b = save("b", job(ranks=4, threads=2), torch_version="2.12.0", environment={"NCCL_DEBUG": "WARN", "X_NEW": "1"})
    text = shown(capsys, a, b)
    assert "; A has 2 ranks, B 4 ranks; A trains 158 samples/s, B 317" in text
    for line in (
        "ranks: 2 in A, 4 in B", "torch: 2.13.0 in A, 2.12.0 in B", "OMP_NUM_THREADS: 1 in A, not set in B",
        "X_NEW: not set in A, 1 in B", "torch threads per rank: 1 in A, 2 in B",
    ):  # fmt: skip
        assert line in text
    assert "NCCL_DEBUG:" not in text


def test_other_formats_have_the_same(save, capsys):
    a, b = save("a", job(exposed=31.0)), save("b", job(exposed=8.0))
    assert "| gradient reduction | 31.0 | 8.0 | -23.0 |" in shown(capsys, a, b, format="markdown")
    assert "a step of B is 18%" in shown(capsys, a, b, format="html")
    assert "gradient reduction,31.0,8.0,-23.0," in shown(capsys, a, b, format="csv")
    assert '"is_change": true' in shown(capsys, a, b, format="json")


def test_a_saved_comparison_is_shown_again(save, tmp_path, capsys):
    saved = tmp_path / "compared.json"
    saved.write_text(shown(capsys, save("a", job(exposed=31.0)), save("b", job()), format="json"))
    assert run(Options(run_dir=saved)) == 0
    assert "ddpdoctor: a step of B is" in capsys.readouterr().out


def without_blocks():
    known = job()
    return {"budget": encode(replace(known.budget, blocks_ms=()))}


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        ({"reason": "19 steps are too few: at least 20 are needed"}, "has no time budget: 19 steps are too few"),
        (without_blocks(), "does not say how much its steps vary"),
        ({"budget": {"phases": 3}}, "the time budget in the report cannot be read"),
    ],
)
def test_a_run_without_a_budget_is_named(speed, said, save):
    with pytest.raises(UserError, match=f"b.*{said}") as refused:
        run(Options(run_dir=save("a", job()), compare=save("b", speed)))
    assert refused.value.status == 2


def test_what_is_no_other_run_is_refused(save, tmp_path):
    a = save("a", job())
    bench = tmp_path / "bench.json"
    bench.write_text(render_json(benches.everything()))
    for other, said in (
        (a, "are the same run"), (a / "report.json", "are the same run"), (tmp_path / "none", "there is no"),
        (bench, "it is not a run of `ddpdoctor wrap`"),
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
    assert f"no browser could be opened here; the page is {tmp_path}/page.html" in capsys.readouterr().err


def test_only_a_page_can_be_opened(saved):
    with pytest.raises(UserError, match="--open shows a page, and --format json is none"):
        run(Options(run_dir=saved, format="json", opens=True))


# The debug level, and what --quiet leaves.


@pytest.mark.parametrize(
    ("asked", "env", "level"),
    [
        (None, {}, "AUTO"), (None, {"TORCH_DISTRIBUTED_DEBUG": ""}, "AUTO"),
        (None, {"TORCH_DISTRIBUTED_DEBUG": "OFF"}, None), ("INFO", {"TORCH_DISTRIBUTED_DEBUG": "OFF"}, "INFO"),
        ("OFF", {}, "OFF"),
    ],
)  # fmt: skip
def test_the_debug_level_goes_by_the_backend_unless_somebody_said_otherwise(asked, env, level):
    assert choose_debug_level(asked, env) == level


@pytest.mark.parametrize(("asked", "level"), [(None, None), ("DETAIL", "DETAIL")])
def test_without_room_detail_is_for_who_asks_for_it(asked, level):
    assert choose_debug_level(asked, {}, has_space=False) == level


@pytest.mark.parametrize(
    ("chosen", "env", "reported"),
    [
        ("AUTO", {}, "slows down small steps"),
        ("DETAIL", {}, "0.3 to 1 ms"),
        (None, {"TORCH_DISTRIBUTED_DEBUG": "detail"}, "0.3 to 1 ms"),
        ("OFF", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, None),
        (None, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}, None),
        (None, {}, None),
    ],
)
def test_the_price_of_detail_is_shown_to_who_pays_it(chosen, env, reported):
    note = debug_note(chosen, env)
    assert note is None if reported is None else reported in note


@pytest.mark.parametrize(("hang_timeout_s", "is_reported"), [(300, False), (599, False), (600, True)])
def test_a_hang_timeout_that_torch_does_not_wait_for_is_reported_before_the_start(hang_timeout_s, is_reported):
    assert (_patience_note(hang_timeout_s) is not None) is is_reported


@pytest.mark.parametrize("is_command", [True, False])
@pytest.mark.parametrize("level", [None, "OFF", "INFO", "DETAIL", "AUTO"])
def test_a_command_has_torchs_own_variable_and_ranks_with_a_recorder_that_of_the_recorder(level, is_command):
    made = debug_environment({"TORCH_DISTRIBUTED_DEBUG": "before"}, level, is_command=is_command)
    expected = {"TORCH_DISTRIBUTED_DEBUG": "before" if level is None else level}
    if level in ("AUTO", "DETAIL") and not is_command:
        expected = {"DDPDOCTOR_DETAIL": "gloo" if level == "AUTO" else "always"}
    elif level == "AUTO":
        expected = {} if has_gpu_driver(System()) else {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert made == expected


def report_of(*severities, verdict=None):
    findings = tuple(
        Finding(code=f"DD60{n}", kind="stuck", severity=severity, confidence=Confidence.HIGH, summary="s")
        for n, severity in enumerate(severities)
    )
    return Report(
        command=(), started_at="", ended_at="", job=None, verdict=None if verdict is None else findings[verdict],
        findings=findings, checks=(), ranks=(),
    )  # fmt: skip


def test_quiet_leaves_errors_only():
    left = keep_errors(report_of(Severity.ERROR, Severity.WARNING, Severity.INFO, verdict=0))
    assert [finding.severity for finding in left.findings] == [Severity.ERROR]
    assert left.verdict == left.findings[0]


def test_quiet_leaves_nothing_of_warnings():
    assert keep_errors(report_of(Severity.WARNING, Severity.INFO, verdict=0)) is None


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
    _withdraw(options, Judgment(findings=(), checks=(), certain=False))
    assert not page.exists()
    assert not options.report_file.exists()


def test_a_page_that_cannot_be_written_is_refused_before_the_run_folder_is_made(prepared, tmp_path):
    with pytest.raises(UserError, match=r"--html .* cannot be written"):
        prepared(tmp_path / "missing" / "page.html")
    assert not (tmp_path / "run").exists()
