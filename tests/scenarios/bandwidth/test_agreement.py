"""Before anything is measured: ranks that do not want the same, nonsense, and ranks that do not come."""

import pytest

from tests.scenarios.bandwidth.running import BENCH, QUICK, bench, by_hand, finish, start, torchrun
from tests.scenarios.running import free_port

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


def test_a_rank_with_another_version_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import ddpdoctor\nddpdoctor.__version__ = '0.0.7'\n")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    other = start(*BENCH, *QUICK, RANK="1", PYTHONPATH=str(tmp_path), **common)
    done = finish(start(*BENCH, *QUICK, RANK="0", **common))

    assert (done.status, finish(other).status) == (2, 2)
    assert "0.0.7 on rank 1" in done.stderr


def test_one_wrong_command_line_is_reported_by_rank_0_with_the_rank():
    done = by_hand(QUICK, (*QUICK, "--dtype", "float3"), (*QUICK, "--max-sise", "1"))

    assert [one.status for one in done] == [2, 2, 2]
    assert "rank 1: --dtype float3 is not known" in done[0].stderr
    assert "bfloat16" in done[0].stderr
    assert [one.stderr for one in done[1:]] == ["", ""]


def test_a_rank_of_a_launcher_starts_no_ranks():
    options = (*QUICK, "--nproc-per-node", "2")
    done = by_hand(options, options)

    assert [one.status for one in done] == [2, 2]
    assert "--nproc-per-node works only without a launcher" in done[0].stderr
    assert done[1].stderr == ""


def test_under_torchrun_nonsense_is_reported_once():
    done = torchrun("--min-size", "5GiB", "--max-size", "1KiB")

    assert done.stderr.count("--min-size 5 GiB is above --max-size 1 KiB") == 1
    assert done.stderr.count("exitcode  : 2") == 2
    assert done.stdout == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_torch_that_cannot_be_imported_is_reported_once(tmp_path, ranks):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object')")
    done = bench(*QUICK, ranks=ranks, PYTHONPATH=str(tmp_path))

    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.count("torch cannot be imported: libcudnn.so.9: cannot open shared object") == 1
    assert "check-env" in done.stderr


def test_a_rank_that_does_not_come_is_named():
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(*BENCH, *QUICK, "--timeout", "20", RANK=str(rank), **common) for rank in (2, 0)]
    done = [finish(process) for process in ranks]

    assert [one.status for one in done] == [4, 4]
    assert done[0].stderr == ""
    assert "rank 1 did not come within 20 s" in done[1].stderr
