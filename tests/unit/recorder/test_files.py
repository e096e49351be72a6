"""Files of a run folder are opened as what they are, and written whole and private."""

import json
import os

import pytest

from ddpdoctor.recorder.storage import files


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("umask")
def test_what_is_written_is_private_whatever_the_umask(tmp_path):
    files.make_folder(tmp_path / "rings")
    files.write_whole(tmp_path / "run.json", "text")
    os.close(files.open_new(tmp_path / "control"))
    assert [mode(tmp_path / name) for name in ("rings", "run.json", "control")] == [0o700, 0o600, 0o600]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control", "rings", "run.json"]


@pytest.mark.parametrize("name", ["run.json", "run.json.part"])
def test_a_link_is_replaced_and_not_written_through(tmp_path, name):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / name).symlink_to("outside")
    files.write_whole(tmp_path / "run.json", b"new")
    assert (tmp_path / "outside").read_text() == "mine"
    assert not (tmp_path / "run.json").is_symlink()
    assert (tmp_path / "run.json").read_text() == "new"


def test_another_name_of_a_file_keeps_what_it_holds(tmp_path):
    (tmp_path / "outside").write_text("mine")
    os.link(tmp_path / "outside", tmp_path / "control")
    os.close(files.open_new(tmp_path / "control"))
    assert (tmp_path / "outside").read_text() == "mine"


def plant(path, kind):
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**40)


@pytest.mark.parametrize("kind", ["link", "dangling", "device", "pipe", "folder", "sparse"])
def test_what_is_no_plain_file_is_not_read_and_waited_for(tmp_path, kind):
    plant(tmp_path / "evidence", kind)
    with pytest.raises(OSError, match=r"it is a link|it is no regular file|it has more than"):
        files.read_plain(tmp_path / "evidence")


@pytest.mark.parametrize("kind", ["link", "dangling", "device", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_written_to(tmp_path, kind):
    plant(tmp_path / "agent.jsonl", kind)
    with pytest.raises(OSError, match=r"it is a link|it is no regular file|No such device|Is a directory"):
        os.close(files.open_plain(tmp_path / "agent.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def test_a_folder_that_is_a_link_is_not_used(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "rings").symlink_to("outside")
    with pytest.raises(OSError, match="it is a link, or no folder"):
        files.make_folder(tmp_path / "rings")


def test_json_of_few_bytes_and_many_values_is_refused():
    healthy = json.dumps([{"rank": rank, "state": "training"} for rank in range(1024)]).encode()
    assert files.check_json(healthy) == healthy
    with pytest.raises(ValueError, match="values"):
        files.check_json(b"[" + b"[]," * files.MAX_JSON_VALUES + b"0]")
