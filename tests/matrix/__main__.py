"""Tries ddpdoctor with versions of torch and Python, and writes docs/torch-versions.md.

python -m tests.matrix                              every version, five minutes and 5 GB of download each
python -m tests.matrix --torch 2.6,2.15 --python 3.10,3.11
python -m tests.matrix --python 3.14=/opt/python3.14/bin/python3
python -m tests.matrix --nccl --torch 2.14.1        NCCL on a stand-in, for whole versions; ten minutes each
python -m tests.matrix --nccl --torch 2.14.1 --only "stall or lost"        ... only some of its tests, by pytest's -k
python -m tests.matrix --table                      only write the page again

Results are kept in results.json beside this file, so that combinations can be tried one by one. An environment is
removed after it was tried.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.matrix import environments
from tests.matrix.nccl import try_nccl
from tests.matrix.table import render
from tests.matrix.tried import try_all

TORCH = ("2.6", "2.8", "2.10", "2.13", "2.14", "2.15")
PYTHON = ("3.10", "3.11", "3.12", "3.13", "3.14")
RESULTS = Path(__file__).with_name("results.json")
NCCL_RESULTS = RESULTS.with_name("nccl.json")
PAGE = environments.ROOT / "docs" / "torch-versions.md"


def main() -> None:
    """Try the combinations that were asked for, one after another."""
    options = _options()
    torches = [] if options.table else options.torch.split(",")
    for torch in torches if options.nccl else []:
        found = _read(NCCL_RESULTS)
        found[torch] = (found.get(torch, {}) if options.only else {}) | try_nccl(torch, options.only)
        NCCL_RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    for torch in [] if options.nccl else torches:
        for named in options.python.split(","):
            version, _, path = named.partition("=")
            print(f"torch {torch}, Python {version}", flush=True)
            key = f"{torch} {version}"
            before = _read(RESULTS).get(key, {}) if options.wrong else {}
            found = _try(torch, path or version, options.folder, before)
            print(f"  {found.get('not_run', '')}{found.get('lacks', '')}", flush=True)
            results = _read(RESULTS) | {key: {"asked": [torch, version], **found}}
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    wanted = [(torch, python) for torch in TORCH for python in PYTHON]
    PAGE.write_text(render(list(_read(RESULTS).values()), wanted, _read(NCCL_RESULTS)))


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="Try versions of torch and Python.")
    parser.add_argument("--torch", default=",".join(TORCH), help="versions with commas between")
    parser.add_argument("--python", default=",".join(PYTHON), help="versions, or VERSION=PATH, with commas between")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where environments are made")
    parser.add_argument("--nccl", action="store_true", help="try NCCL on a stand-in for CUDA, for whole versions")
    parser.add_argument("--only", default="", help="with --nccl: run the tests that pytest -k selects, keep the others")
    parser.add_argument("--wrong", action="store_true", help="leave out the jobs that were right before")
    parser.add_argument("--table", action="store_true", help="try nothing, write the page from what was tried before")
    return parser.parse_args()


def _try(torch: str, python: str, folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    base = environments.find_python(python)
    if base is None:
        return {"not_run": "not run: this Python was not there"}
    place = folder / f"torch-{torch}-{base.parent.parent.name}"
    try:
        return try_all(environments.make(base, torch, place), before)
    except environments.NotMadeError as error:
        return {"not_run": f"not run: {error}"}
    finally:
        environments.remove(place)


if __name__ == "__main__":
    main()
