"""A report is read from what the user names, and never from where a folder's own links lead."""

from pathlib import Path

import pytest

from ddpdoctor.cli.report import Options, read_run, run
from ddpdoctor.model.errors import UserError
from ddpdoctor.report.formats import render_json
from tests import benches
from tests.synthetic import Job, write_folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "saved" / "report.json"
    file.parent.mkdir()
    file.write_text(render_json(benches.everything()))
    return file


def test_a_link_that_the_user_names_is_followed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("saved")
    (tmp_path / "latest.json").symlink_to("saved/report.json")
    assert read_run(tmp_path / "latest") == read_run(tmp_path / "latest.json") == read_run(saved)


def test_a_link_in_the_folder_is_not_followed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").symlink_to(saved)
    with pytest.raises(UserError, match="it is a link") as refused:
        read_run(tmp_path / "run")
    assert refused.value.status == 2


@pytest.mark.parametrize("part", ["rings", "evidence"])
def test_a_part_of_the_folder_that_is_a_link_is_damage(part: str, tmp_path: Path) -> None:
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
def test_json_that_no_report_has_is_a_clear_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match="the report cannot be read"):
        read_run(file)


def test_the_ranks_of_a_ring_that_is_a_link_say_so(tmp_path: Path) -> None:
    write_folder(tmp_path / "run", Job(world=4, steps=3, situation="stuck", tp=2))
    ring = sorted((tmp_path / "run" / "rings").iterdir())[2]
    ring.rename(tmp_path / "moved")
    ring.symlink_to(tmp_path / "moved")
    report = read_run(tmp_path / "run")
    found = [(one.ranks, one.summary) for one in report.findings if one.code == "DD901"]
    assert len(found) == 1
    assert found[0][0] == (2,)
    assert "it is a link" in found[0][1]


def test_a_report_is_written_to_a_file_in_any_format(saved: Path, tmp_path: Path, capsys) -> None:
    for form, begins in (("html", "<!DOCTYPE html>"), ("markdown", "## ddpdoctor"), ("json", "{")):
        file = tmp_path / f"report.{form}"
        assert run(Options(run_dir=saved, format=form, output=file)) == 0
        assert file.read_text().startswith(begins)
    assert capsys.readouterr() == ("", "")


def test_two_outputs_to_one_file_are_refused(saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(UserError, match="--plot and --output are both"):
        run(Options(run_dir=saved, format="html", output=page, plot=page))


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which the user's browser leaves what it was asked to open."""
    opened, program = tmp_path / "opened", tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    program.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{program} %s")
    return opened


def test_a_page_is_opened_in_the_browser(saved: Path, tmp_path: Path, browser: Path, capsys) -> None:
    for file in (tmp_path / "page.html", None):
        assert run(Options(run_dir=saved, output=file, opens=True)) == 0
        page = Path(capsys.readouterr().err.rpartition(" ")[2].strip())
        assert browser.read_text().strip() == page.as_uri()
        assert page.read_text().startswith("<!DOCTYPE html>")
        assert file is None or page == file


def test_without_a_browser_the_page_is_named(saved: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert run(Options(run_dir=saved, output=tmp_path / "page.html", opens=True)) == 0
    assert f"no browser could be opened here; the page is {tmp_path}/page.html" in capsys.readouterr().err


def test_only_a_page_can_be_opened(saved: Path) -> None:
    with pytest.raises(UserError, match="--open shows a page, and --format json is none"):
        run(Options(run_dir=saved, format="json", opens=True))
