"""A report is read from what the user names, and never from where a folder's own links lead."""

from pathlib import Path

import pytest

from ddpdoctor.cli.report import read_run
from ddpdoctor.model.errors import UserError
from ddpdoctor.report.json_format import render_json
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
