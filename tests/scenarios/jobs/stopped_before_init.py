"""A rank is stopped before it joins the group."""

import os
import signal

from training import train

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
train()
