"""Before anything is measured: ranks that do not want the same, nonsense, and ranks that do not come."""

import pytest

from tests.scenarios.bandwidth.running import QUICK, bench, by_hand

pytestmark = pytest.mark.usefixtures("preloaded_python")

NOTHING = "Nothing was measured"


def test_a_rank_with_other_settings_is_named_with_its_values():
    done = by_hand(QUICK, (*QUICK, "--max-size", "64MiB", "--dtype", "bfloat16"), QUICK)

    assert [one.status for one in done] == [2, 2, 2]
    assert "--max-size: 4 KiB on ranks 0 and 2, 64 MiB on rank 1" in done[0].stderr
    assert "--dtype: float32 on ranks 0 and 2, bfloat16 on rank 1" in done[0].stderr
    assert NOTHING in done[0].stderr
    assert [(one.stdout, one.stderr) for one in done[1:]] == [("", ""), ("", "")]
    assert done[0].stdout == ""


def test_one_wrong_command_line_is_reported_by_rank_0_with_the_rank():
    done = by_hand(QUICK, (*QUICK, "--dtype", "float3"), (*QUICK, "--max-sise", "1"))

    assert [one.status for one in done] == [2, 2, 2]
    assert "rank 1: --dtype float3 is not known" in done[0].stderr
    assert "bfloat16" in done[0].stderr
    assert [one.stderr for one in done[1:]] == ["", ""]


def test_a_torch_that_cannot_be_imported_is_reported_once(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object')")
    done = bench(*QUICK, PYTHONPATH=str(tmp_path))

    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.count("torch cannot be imported: libcudnn.so.9: cannot open shared object") == 1
    assert "check-env" in done.stderr
