"""The secret by which processes of one job know each other.

``DDPDOCTOR_TOKEN``, the same on every host, is the only real secret: with it every message is signed, over torchrun's
store too. Without it:

- A Slurm step derives one from job, step and user. That keeps other jobs and strangers' mistakes out; another user of
  the cluster who sets out to can derive it too.
- Under torchrun, and with --nnodes by hand, whoever reaches the port may take part: the same trust that the job's own
  store at MASTER_PORT rests on.

All that a peer can do with it is to send facts, which are parsed within limits and never run. Without a token a peer
that is none of the job's can send wrong ones, so that a report is wrong, and can read what the others sent: hosts,
stacks, variables of the allow-list. Nothing that is sent is hidden on its way, with a token or without.

It holds for every transport (see ``node_meeting``): a connection to the own port proves it before anything is served,
and messages in a store or a shared folder are signed one by one (see ``forwarding``).
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
"""What a server and its clients prove to hold where the job has no secret: that they are ddpdoctor."""


def job_token(launch: Launch, env: Mapping[str, str]) -> bytes | None:
    """Return the token of the job; None where it has none."""
    given = env.get(VARIABLE, "")
    if given:
        return token_bytes(given)
    if launch.launcher is Launcher.SLURM:
        return hashlib.sha256(f"ddpdoctor {launch.run} user {os.getuid()}".encode()).digest()
    return None


def token_bytes(given: str) -> bytes:
    """Return the token that a value of ``DDPDOCTOR_TOKEN`` stands for."""
    return hashlib.sha256(given.encode(errors="surrogateescape")).digest()
