"""In a trial torch.save writes nothing, and a rename of what it would have written does nothing either."""

import os
import subprocess
import sys
from pathlib import Path

from tests.scenarios.running import clean_environment

ROOT = Path(__file__).parents[3]
SCRIPT = """
import io, os, pathlib, shutil, torch
torch.save({"a": 1}, "new.pt.tmp")
os.replace("new.pt.tmp", "new.pt")
torch.save({"a": 1}, pathlib.Path("old.pt.tmp"))
pathlib.Path("old.pt.tmp").rename("old.pt")
torch.save({"a": 1}, "moved.pt.tmp")
shutil.move("moved.pt.tmp", "moved.pt")
os.replace("other.txt", "renamed.txt")
buffer = io.BytesIO()
torch.save({"a": 1}, buffer)
assert len(buffer.getvalue()) > 100
try:
    os.replace("gone", "x")
except FileNotFoundError:
    print("as ever")
"""


def test_files_that_were_there_before_stay_as_they_are(tmp_path: Path) -> None:
    run_folder, work = tmp_path / "run", tmp_path / "work"
    for folder in (run_folder / "rings", run_folder / "evidence", work):
        folder.mkdir(parents=True)
    for name in ("old.pt", "old.pt.tmp", "other.txt"):
        (work / name).write_text(name)
    (work / "script.py").write_text(SCRIPT)
    path = f"{ROOT / 'ddpdoctor' / 'recorder' / 'bootstrap'}{os.pathsep}{ROOT}"
    env = clean_environment(
        PYTHONPATH=path, DDPDOCTOR_RUN=str(run_folder), DDPDOCTOR_TUNE_ROUNDS="4", RANK="0", WORLD_SIZE="1",
        LOCAL_RANK="0",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=work, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "as ever\n"), done.stderr
    assert {path.name: path.read_text() for path in work.iterdir() if path.name != "script.py"} == {
        "old.pt": "old.pt", "old.pt.tmp": "old.pt.tmp", "renamed.txt": "other.txt",
    }  # fmt: skip
