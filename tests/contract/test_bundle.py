"""A bundle as a user makes it, and what may not be in it."""

import io
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.diagnose.bundle import DATA_KEYS, make_bundle, pack
from ddpdoctor.report.formats import render_json
from tests import benches

TELLING = ("node17.cluster.example", "10.1.2.3", "alice", "hf_abcdefghijklmnopqrstuv12", "hunter2hunter2", "SECRET = 1")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder whose report is full of names, addresses and secrets."""
    report = benches.everything()
    finding = replace(
        report.findings[0],
        summary="rank 0 on node17.cluster.example raised RuntimeError: login with hf_abcdefghijklmnopqrstuv12 failed",
        hosts=("node17.cluster.example",),
        evidence=("connected to 10.1.2.3 as alice", "password=hunter2hunter2", "/home/alice/train.py"),
    )
    data = {**report.data, "source": {"lines": ["SECRET = 1"]}, "new_part": "SECRET = 1"}
    data["run"] = {"environment": {"PGPASSWORD": "hunter2hunter2"}}
    told = replace(report, findings=(finding, *report.findings[1:]), verdict=finding, data=data)
    folder = tmp_path / "runs" / "one"
    (folder / "rings").mkdir(parents=True)
    (folder / "report.json").write_text(render_json(told))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USER", "alice")
    return folder


def test_nothing_telling_is_in_a_bundle_and_report_opens_it(run_dir, run) -> None:
    done = run("bundle", run_dir, "--yes")
    assert done.returncode == 0
    assert all(
        part in done.stdout
        for part in ("1 user name", "data.new_part of the report", "data.source of the report", "rings/")
    )
    path = Path("ddpdoctor-bundle-one.zip")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert files.keys() == {"report.json", "report.html"}
    assert [(name, text) for name, content in files.items() for text in TELLING if text in content] == []
    summary = json.loads(files["report.json"])["verdict"]["summary"]
    assert summary.startswith("rank 0 on host-")
    assert "RuntimeError" in summary

    assert "raised RuntimeError: login with *** failed" in run("report", path).stdout


def test_source_is_kept_on_request(run_dir, run) -> None:
    done = run("bundle", run_dir / "report.json", "--yes", "--with-source", "-o", "with.zip")
    assert (done.returncode, "data.source" in done.stdout) == (0, False)
    with zipfile.ZipFile("with.zip") as archive:
        assert json.loads(archive.read("report.json"))["data"]["source"] == {"lines": ["SECRET = ***"]}


def test_nothing_is_written_unless_the_user_agrees(run_dir, run) -> None:
    done = run("bundle", run_dir)
    assert done.returncode == 2
    assert "ddpdoctor-bundle-one.zip will hold" in done.stdout
    assert "Give --yes" in done.stderr
    assert not Path("ddpdoctor-bundle-one.zip").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("bundle", "nowhere", "--yes"), "nowhere does not exist"),
        (("bundle", "--yes"), "no run folder"),
        (("bundle", "RUN", "--yes", "-o", "no/such/folder.zip"), "--output"),
        (("report", "text.zip"), "is not a ddpdoctor bundle"),
        (("bundle", "loop", "--yes"), "symbolic links form a loop"),
        (("diff", "loop", "RUN"), "symbolic links form a loop"),
    ],
)
def test_what_cannot_be_used_is_said(run_dir, run, words, hint) -> None:
    Path("text.zip").write_bytes(pack({"another.json": "{}"}))
    Path("loop").symlink_to("loop")
    done = run(*(run_dir if word == "RUN" else word for word in words))
    assert done.returncode == 2
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def zipped(method: int, text: bytes = b"{}" + b" " * 5000) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        archive.writestr("report.json", text)
    return packed.getvalue()


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


WHOLE = zipped(zipfile.ZIP_DEFLATED, random.Random(1).randbytes(5000))
DIRECTORY = WHOLE.rindex(b"PK\x01\x02")
DAMAGED = {
    "content": changed(WHOLE, 60, b"\xff" * 900),
    "checksum": changed(WHOLE, DIRECTORY + 16, b"abcd"),
    "method": changed(WHOLE, DIRECTORY + 10, b"\x63\0"),
    "encrypted": changed(WHOLE, DIRECTORY + 8, b"\x01\0"),
    "start": changed(WHOLE, DIRECTORY + 42, b"\xff\xff\0\0"),
    "sizes": changed(WHOLE, DIRECTORY + 20, b"\xff\xff\xff\x7f\xff\xff\xff\x7f"),
    "no start": WHOLE[40:],
    "no content": changed(WHOLE, 0, bytes(DIRECTORY)),
    "name": changed(WHOLE, DIRECTORY + 46, b"\xff\xfe"),
    "lzma": zipped(zipfile.ZIP_LZMA),
    "damaged lzma": changed(zipped(zipfile.ZIP_LZMA, random.Random(2).randbytes(5000)), 60, b"\xff" * 900),
    "bzip2": zipped(zipfile.ZIP_BZIP2),
    "two ends": WHOLE + WHOLE[-22:],
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("verb", ["report", "diff"])
def test_a_damaged_bundle_is_a_clear_error(run_dir, run, verb, damage) -> None:
    Path("odd.zip").write_bytes(DAMAGED[damage])
    done = run(verb, "odd.zip", *([run_dir] if verb == "diff" else []))
    assert (done.returncode, "odd.zip" in done.stderr) == (2, True)
    is_packed_otherwise = damage in {"lzma", "damaged lzma", "bzip2"}  # none is unpacked
    assert "is not a ddpdoctor bundle" in done.stderr or not is_packed_otherwise


@pytest.mark.full
def test_no_damage_of_a_bundle_ends_in_a_traceback(run_dir, run) -> None:
    dice = random.Random(3)
    assert run("bundle", run_dir, "--yes", "-o", "odd.zip").returncode == 0
    whole = Path("odd.zip").read_bytes()
    for _ in range(300):
        data = bytearray(whole[: dice.choice([len(whole), dice.randrange(len(whole))])])
        for _ in range(dice.choice([1, 3, 40])):
            data[dice.randrange(len(data))] = dice.randrange(256)
        Path("odd.zip").write_bytes(data)
        done = run("report", "odd.zip")
        assert (done.returncode in (0, 2), "internal error" in done.stderr) == (True, False)


def test_the_list_names_what_reports_hold() -> None:
    """A new part of a report is left out of bundles until somebody puts it on the list."""
    assert benches.everything().data.keys() <= DATA_KEYS
    bundle = make_bundle(benches.everything(), [], with_source=False)
    assert bundle.left_out == ()
