"""Some hundreds of damaged files, always the same: `tests/bench/fuzz.py` tries as many as wanted."""

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz_samples import make_benches, make_checkpoints, make_runs
from tests.fuzzing import Sample, check_output, fuzz, peak_mib


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("numbers", [range(25), pytest.param(range(25, 75), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("make", [make_runs, make_benches, make_checkpoints])
def test_damaged_files_end_in_no_traceback_no_hang_and_no_escape(
    make: Callable[[Path], list[Sample]], numbers: range, tmp_path: Path
) -> None:
    assert list(fuzz(make(tmp_path), "kept", numbers)) == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("text", "a\x1b[31m", "U+001B"),
        ("csv", "a\u202eb", "U+202E"),
        ("junit", "<a>", "no XML"),
        ("github", "::error::a\nb", "no command"),
        ("sarif", "{", "no JSON"),
        ("markdown", "<script>x</script>", "markup"),
    ],
)
def test_what_a_reader_would_act_on_is_seen(name: str, text: str, said: str) -> None:
    assert any(said in what for what in check_output(name, text))


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x05]r\xff\xff\xff\x7f.",  # a memo of two billion values
        b"\x80\x05\x96" + struct.pack("<Q", 2**34) + b".",  # a bytearray of 16 GiB
        b"\x80\x05\x8e" + struct.pack("<Q", 2**34) + b".",  # bytes of as much
        b"\x80\x05\x8d" + struct.pack("<Q", 2**62) + b".",
    ],
)
def test_a_pickle_takes_no_memory_for_what_it_only_announces(opcodes: bytes, tmp_path: Path) -> None:
    from ddpdoctor.probes.checkpoint.formats import Unreadable, read_pickle

    path, before_mib = tmp_path / "sparse.pkl", peak_mib()
    with path.open("wb") as file:
        file.write(opcodes)
        file.truncate(2**35)
    with path.open("rb") as file, contextlib.suppress(Unreadable):
        read_pickle(file)
    assert peak_mib() - before_mib < 200
