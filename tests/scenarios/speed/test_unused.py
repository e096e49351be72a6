"""A needless find_unused_parameters is reported on real ranks; a branch that is left out once keeps it silent."""

from pathlib import Path

import pytest

from tests.scenarios.running import PATIENT, run

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize(("unused", "expected"), [("never", [[0, 1]]), ("changing", []), ("fixed", [])])
def test_find_unused_parameters_without_any(unused: str, expected: list[list[int]], tmp_path: Path) -> None:
    ran = run("gradient_times", tmp_path, "--speed", *PATIENT, ranks=2, args=(unused,))
    found = [one for one in ran.report["findings"] if one["kind"] == "find-unused-needless"]
    assert [one["ranks"] for one in found] == expected, ran.stderr
    assert all("find_unused_parameters" in one["fix"] for one in found)
