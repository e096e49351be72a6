"""The debug level, and what --quiet leaves."""

import pytest

from ddpdoctor.cli.running import _patience_note, _withdraw, debug_note, keep_errors
from ddpdoctor.cli.wrap import Options, prepare
from ddpdoctor.collect.system import System
from ddpdoctor.launch.command_line import split_command
from ddpdoctor.launch.starting import choose_debug_level, debug_environment, has_gpu_driver
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, Finding, Judgment, Report, Severity


@pytest.mark.parametrize(
    ("asked", "env", "level"),
    [
        (None, {}, "AUTO"),
        (None, {"TORCH_DISTRIBUTED_DEBUG": ""}, "AUTO"),
        (None, {"TORCH_DISTRIBUTED_DEBUG": "OFF"}, None),
        ("INFO", {"TORCH_DISTRIBUTED_DEBUG": "OFF"}, "INFO"),
        ("OFF", {}, "OFF"),
    ],
)
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


def make_report(*severities, verdict=None):
    findings = tuple(
        Finding(code=f"DD60{n}", kind="stuck", severity=severity, confidence=Confidence.HIGH, summary="s")
        for n, severity in enumerate(severities)
    )
    return Report(
        command=(),
        started_at="",
        ended_at="",
        job=None,
        verdict=None if verdict is None else findings[verdict],
        findings=findings,
        checks=(),
        ranks=(),
    )


def test_quiet_leaves_errors_only():
    left = keep_errors(make_report(Severity.ERROR, Severity.WARNING, Severity.INFO, verdict=0))
    assert [finding.severity for finding in left.findings] == [Severity.ERROR]
    assert left.verdict == left.findings[0]


def test_quiet_leaves_nothing_of_warnings():
    assert keep_errors(make_report(Severity.WARNING, Severity.INFO, verdict=0)) is None


@pytest.fixture
def prepared(tmp_path):
    """Prepare a job whose page goes to this file."""
    script = tmp_path / "train.py"
    script.write_text("")

    def make(page):
        return prepare(
            Options(
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
