"""The secret by which the processes of one job recognize each other.

``DDPDOCTOR_TOKEN``, the same on every host, is the only real secret. With it every message is signed, also over
torchrun's store. Without it:

- A Slurm step derives a token from job, step and user. That keeps out other jobs and accidents, but another user of the
  cluster can derive it too.
- Under torchrun, and with --nnodes by hand, anyone who reaches the port may take part. The job's own store at
  MASTER_PORT trusts its network in the same way.

A peer with the token can only send facts, which are parsed within limits and never run. Without a token, a stranger can
send wrong facts, which makes the report wrong, and can read what the others sent: hosts, stacks, variables of the
allow-list. Nothing is encrypted, with or without a token.

The token protects every transport (see ``node_meeting``). A connection to ddpdoctor's own port proves it before
anything is served. Messages in a store or a shared folder are signed one by one (see ``forwarding``).
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.launch import Launch

VARIABLE = "DDPDOCTOR_TOKEN"
NO_TOKEN = b"ddpdoctor"
"""The shared value if the job has no secret. It proves only that the other side is ddpdoctor."""


def job_token(launch: Launch, env: Mapping[str, str]) -> bytes | None:
    """Return the token of the job, or None if it has none."""
    given = env.get(VARIABLE, "")
    if given:
        return token_bytes(given)
    if launch.launcher is Launcher.SLURM:
        return hashlib.sha256(f"ddpdoctor {launch.run} user {os.getuid()}".encode()).digest()
    return None


def token_bytes(given: str) -> bytes:
    """Return the token for a value of ``DDPDOCTOR_TOKEN``."""
    return hashlib.sha256(given.encode(errors="surrogateescape")).digest()
