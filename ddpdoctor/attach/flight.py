"""Asks for dumps of NCCL's flight recorder through its pipe, and finds dumps that a rank has already written.

With TORCH_NCCL_DEBUG_INFO_PIPE_FILE set, a rank reads its pipe each second and dumps when a byte comes; the job goes on
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, DumpPipe). A pipe that nobody reads is not written to.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.attach.find import named_file
from ddpdoctor.model.attached import Refusal
from ddpdoctor.recorder.storage.files import read_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ddpdoctor.model.attached import SeenRank

SOURCE = "flight recorder"
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCHCOMM_FR_DUMP_TEMP_FILE")
"""The prefix of a dump's path; the rank is appended."""
OLD_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108 - torch's own, up to 2.6
NEW_DEFAULT = "torch/comm_lib_trace_rank_"
"""Below XDG_CACHE_HOME or ~/.cache, since torch 2.7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A dump on disk."""

    path: Path
    modified_ns: int


def ask_for_dump(rank: SeenRank, env: Mapping[str, str]) -> Refusal | None:
    """Write a byte into the rank's pipe, if it has one that it reads. Never waits."""
    stem = env.get(PIPE)
    if not stem or rank.rank is None:
        return None
    path = named_file(rank.pid, f"{stem}{rank.rank}.pipe")
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        reason = "no process reads" if error.errno == errno.ENXIO else f"{error.strerror or error}:"
        return Refusal(source=SOURCE, reason=f"{reason} {stem}{rank.rank}.pipe, the pipe that {PIPE} names")
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return Refusal(source=SOURCE, reason=f"{stem}{rank.rank}.pipe is not a pipe")
        os.write(pipe, b"1")
    except OSError as error:
        return Refusal(source=SOURCE, reason=f"{stem}{rank.rank}.pipe: {error.strerror or error}")
    finally:
        os.close(pipe)
    return None


def find_dump(rank: SeenRank, env: Mapping[str, str], started_ns: int) -> Dump | None:
    """Return the newest dump that this process has written since it started, or None."""
    found = []
    for path in _candidates(rank, env):
        try:
            state = path.lstat()
        except OSError:
            continue
        if stat.S_ISREG(state.st_mode) and state.st_mtime_ns >= started_ns:
            found.append(Dump(path=path, modified_ns=state.st_mtime_ns))
    return max(found, key=lambda dump: dump.modified_ns, default=None)


def read_dump(dump: Dump) -> bytes:
    """Return the content of a dump, at most 64 MiB; raises OSError."""
    return read_plain(dump.path)


def _candidates(rank: SeenRank, env: Mapping[str, str]) -> Iterable[Path]:
    if rank.rank is None:
        return
    named = [env[name] for name in PREFIXES if env.get(name)]
    cache = env.get("XDG_CACHE_HOME") or f"{env.get('HOME', '/root')}/.cache"
    for prefix in named or (OLD_DEFAULT, f"{cache}/{NEW_DEFAULT}"):
        yield named_file(rank.pid, f"{prefix}{rank.rank}")
