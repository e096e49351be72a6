"""`check-consistency` as a user meets it on the command line, before any rank starts; and the public names."""

import json
from pathlib import Path

import jsonschema
import pytest

from ddpdoctor.cli import check_consistency
from ddpdoctor.cli.options import Argument, declared_by
from tests.scenarios.running import SCHEMA

VERB = ("check-consistency",)


def test_help_shows_every_option_within_80_columns(run):
    done = run("--help", COLUMNS="80")
    declared = declared_by(check_consistency.Options)
    names = [name for one in declared if not isinstance(one.option, Argument) for name in one.names]
    assert (done.returncode, done.stderr) == (0, "")
    assert [name for name in names if name not in done.stdout] == []
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "neither --model nor --diff was given"),
        (("a.pt", "b.pt"), "files are compared only with --diff"),
        (("--diff", "a.pt"), "--diff needs at least two files, but got 1"),
        (("--model", "m:f", "--timeout", "soon"), "--timeout is 'soon'"),
        (("--model", "m:f", "--steps", "0"), "--steps"),
        (("--model", "m:f", "--backend", "mpi"), "--backend"),
        (("--modell", "m:f"), "No such option: --modell"),
    ],
)
def test_nonsense_is_an_error_that_says_what_is_wrong(run, options, message):
    done = run(*options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("model", "message"),
    [("train.py", "--model is 'train.py'"), ("nowhere:build", "there is no module nowhere")],
)
def test_a_model_that_is_not_there_is_reported_once_by_one_rank(run, model, message):
    done = run("--model", model, "--nproc-per-node", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_what_is_public_is_found_and_nothing_else():
    import ddpdoctor

    named = {name: getattr(ddpdoctor, name).__name__ for name in ddpdoctor.__all__}
    assert named.pop("watch") == "Watch"
    assert all(found == name for name, found in named.items())
    assert issubclass(ddpdoctor.ConsistencyError, RuntimeError)
    with pytest.raises(AttributeError, match="no attribute 'check_everything'"):
        ddpdoctor.check_everything  # noqa: B018 - the look itself raises
    assert (Path(ddpdoctor.__file__).parent / "py.typed").exists()


@pytest.fixture
def diff(tmp_path, monkeypatch, capsys):
    """Compare files in this process, which has torch already; return the status and what was printed."""
    monkeypatch.chdir(tmp_path)

    def compare(*names, **options):
        files = tuple(map(Path, names))
        status = check_consistency.run(check_consistency.Options(files=files, diff=True, limit_s=120.0, **options))
        return status, capsys.readouterr().out

    return compare


def save(path, weight, mean):
    import torch

    state = {"0.weight": torch.full((2, 3), weight), "1.running_mean": torch.full((3,), mean)}
    torch.save({"model": state, "epoch": 1}, path)


def test_files_are_compared_without_ranks_and_the_verdict_comes_first(diff, tmp_path):
    for rank, weight in enumerate((1.0, 1.0, 1.5)):
        save(tmp_path / f"ckpt_rank{rank}.pt", weight, 0.0)

    status, reported = diff("ckpt_rank0.pt", "ckpt_rank1.pt")
    assert status == 0
    assert reported.startswith("ddpdoctor: equal in all 2 tensors")

    status, reported = diff("ckpt_rank0.pt", "ckpt_rank1.pt", "ckpt_rank2.pt", report_dir=tmp_path / "kept")
    first, *rest = reported.splitlines()
    (row,) = [line.split() for line in rest if line.startswith("  model.0.weight")]
    assert status == 1
    assert "0.weight differs in ckpt_rank2.pt" in first
    assert row == ["model.0.weight", "float32[2,", "3],", "file", "3", "against", "1", "6", "6", "0.5", "0.33"]
    report = json.loads((tmp_path / "kept" / "report.json").read_text())
    jsonschema.validate(report, SCHEMA)
    assert (report["verdict"]["code"], report["verdict"]["ranks"]) == ("DD501", [2])


def test_a_difference_is_what_was_asked_for_where_fail_on_does_not_say_otherwise(diff, tmp_path):
    save(tmp_path / "a.pt", 1.0, 0.0)
    save(tmp_path / "b.pt", 1.0, 1.0)
    assert diff("a.pt", "b.pt")[0] == 1
    assert diff("a.pt", "b.pt", fail_on="error")[0] == 0
    assert diff("a.pt", "b.pt", fail_on="never")[0] == 0


def test_a_file_that_cannot_be_read_is_named(run, tmp_path):
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04 and no more")
    done = run("--diff", "a.pt", "a.pt")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a.pt" in done.stderr
    assert "Traceback" not in done.stderr
