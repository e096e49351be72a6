"""Scripts that do what scripts do to their process run as they would without the recorder: to the byte, and the status.

Each is a function of ``scripts.py``, or a file beside it, and is run bare and recorded.
"""

import os
import re
from pathlib import Path

import pytest

from tests.scenarios.harmless.alone import defects, make_folder, read_rings, run_bare, run_recorded

SCRIPTS = Path(__file__).with_name("scripts.py")
ALONE = "interrupted_anywhere"
AS_ROOT = frozenset({"changes_user", "changes_root"})
_CHANGES = re.compile(rb"0x[0-9a-f]+|\bpid=\d+")


@pytest.mark.parametrize("name", [ALONE, *re.findall(r"^def ([a-z]\w+)", SCRIPTS.read_text(), re.MULTILINE)])
def test_a_script_runs_as_without_the_recorder(name: str, tmp_path: Path) -> None:
    if name in AS_ROOT and os.geteuid():
        pytest.skip("only root may")
    script = [str(SCRIPTS.with_stem(name))] if name == ALONE else [str(SCRIPTS), name]
    for place in ("bare", "recorded"):
        (tmp_path / place).mkdir()
    folder = make_folder(tmp_path / "run")
    bare = run_bare(*script, WORK=str(tmp_path / "bare"))
    recorded = run_recorded(folder, *script, WORK=str(tmp_path / "recorded"))
    assert recorded.status == bare.status
    assert _CHANGES.sub(b"", recorded.stderr) == _CHANGES.sub(b"", bare.stderr)
    assert recorded.stdout == bare.stdout
    assert bare.stdout, "the script says how it went"
    assert len(read_rings(folder)) == 1
    assert defects(folder) == []
