"""The lines around a blamed one: of a file that is still the one that ran, and without secrets."""

import os
import time

import pytest

from ddpdoctor.collect.run.source_lines import MAX_SOURCE_BYTES, MAX_WIDTH, read_excerpt

LATER = time.time() + 3600


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


TEN = "\n".join(f"line {n}" for n in range(1, 11)) + "\n"


@pytest.mark.parametrize(
    ("line", "first", "lines"),
    [(5, 3, (3, 4, 5, 6, 7)), (1, 1, (1, 2, 3)), (2, 1, (1, 2, 3, 4)), (9, 7, (7, 8, 9, 10))],
)
def test_five_lines_or_fewer_at_the_ends(tmp_path, line, first, lines):
    found = read_excerpt(written(tmp_path / "a.py", TEN.rstrip()), line, LATER)
    assert (found.first, found.blamed, found.lines) == (first, line, tuple(f"line {n}" for n in lines))


@pytest.mark.parametrize("line", [-1, 0, 12])
def test_a_line_that_is_not_there(tmp_path, line):
    assert read_excerpt(written(tmp_path / "a.py", TEN), line, LATER) is None


def test_secrets_are_hidden(tmp_path):
    text = 'api_key = "sk-proj-abcdefghij0123456789ABCDEFGHIJ"\nwandb.login(key="x")\npassword = "hunter2!"\n'
    shown = " ".join(read_excerpt(written(tmp_path / "a.py", text), 2, LATER).lines)
    assert "abcdefghij" not in shown
    assert "hunter2" not in shown
    key = 'KEY = """-----BEGIN PRIVATE KEY-----\nabcd\nefgh\nijkl\n-----END PRIVATE KEY-----"""\nx = 1\n'
    found = read_excerpt(written(tmp_path / "b.py", key), 4, LATER)
    assert found.first == 2
    assert not {"abcd", "efgh", "ijkl"} & set(found.lines)
    assert found.lines[-1] == "x = 1"


def test_bytes_that_are_not_utf8_and_long_lines(tmp_path):
    found = read_excerpt(written(tmp_path / "a.py", b"# gr\xf6\xdfe\r\n" + b"x" * 5000), 1, LATER)
    assert found.lines[0] == "# gr��e"
    assert len(found.lines[1]) == MAX_WIDTH


def test_a_file_that_changed_since_is_not_shown(tmp_path):
    assert read_excerpt(written(tmp_path / "a.py", TEN), 5, time.time() - 3600) is None


def test_what_is_no_regular_file_or_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    large = written(tmp_path / "large.py", "x\n" * (MAX_SOURCE_BYTES // 2 + 1))
    for path in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path), str(tmp_path / "none"), large, "a\0b", "<string>",
                 str(tmp_path / "circle")):  # fmt: skip
        assert read_excerpt(path, 1, LATER) is None


def test_a_link_to_a_file_is_followed(tmp_path):
    (tmp_path / "link.py").symlink_to(written(tmp_path / "a.py", TEN))
    assert read_excerpt(str(tmp_path / "link.py"), 5, LATER).lines[2] == "line 5"
