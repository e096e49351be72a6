"""Control groups with limits, of version 1 or 2, whichever the machine has with the controller that is wanted."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.needs import need

TOP = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def lent_groups() -> Iterator[Callable[..., tuple[str, ...]]]:
    """Make control groups with limits; each call returns the beginning of a command that runs in one."""
    made: list[Path] = []

    def make(controller: str, **limits: object) -> tuple[str, ...]:
        need(os.geteuid() == 0, "needs root: control groups")
        v1 = (TOP / controller).is_dir()
        top = TOP / controller if v1 else TOP
        has = v1 or controller in (top / "cgroup.subtree_control").read_text().split()
        need(has, f"needs the control group controller {controller}")
        folder = top / f"ddpdoctor-test-{os.getpid()}-{len(made)}"
        folder.mkdir()
        made.append(folder)
        for name, value in limits.items():
            version, _, file = name.partition("_")
            if version == ("v1" if v1 else "v2"):
                (folder / file.replace("__", ".")).write_text(str(value))
        return ("sh", "-ec", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh")

    try:
        yield make
    finally:
        for folder in made:
            for _ in range(50):  # the kernel takes a moment to forget processes that have ended
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.1)
