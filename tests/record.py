"""Keeps runs of real jobs for the tests: ``python -m tests.record [-n JOBS_AT_A_TIME] [NAME ...]``.

It runs the scenarios marked ``kept`` whose names hold one of the names given, all without one, and keeps the runs of
those that pass. What fails on a busy machine is tried again, twice.
"""

import argparse
import os
import subprocess
import sys
import tempfile

from tests import kept

TRIES = 3


def main() -> int:
    """Record, and judge again what was recorded."""
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=__doc__)
    parser.add_argument("-n", default="2", metavar="COUNT", help="tests at a time")
    parser.add_argument("--stale", action="store_true", help="those whose layout or job has changed")
    parser.add_argument("names", nargs="*", metavar="NAME", help="words of the names of tests")
    given = parser.parse_args()
    names = given.names
    if given.stale:
        names = [test.partition("::")[2].removesuffix("]") for test in stale().values()]
        if not names:
            return 0
    words = [sys.executable, *f"-m pytest -q -n {given.n} --dist worksteal -m kept tests/scenarios".split()]
    env = {**os.environ, "KEPT_RUNS": "\n".join(["record", *names])}
    with tempfile.TemporaryDirectory() as cache:
        words += ["-o", f"cache_dir={cache}"]
        tries = (subprocess.run([*words, *["--lf"] * (n > 0)], env=env, check=False).returncode for n in range(TRIES))
        return int(all(tries))


def stale() -> dict[str, str]:
    """Return the files of kept runs that were made from other sources than those here, with their tests."""
    found = {}
    for path in sorted(kept.KEPT.glob("*.tar.xz")):
        about = kept.read_about(path)
        if about["sources"] != kept.sources_of(about["command"][0]):
            found[path.name] = about["test"]
    return found


if __name__ == "__main__":
    sys.exit(main())
