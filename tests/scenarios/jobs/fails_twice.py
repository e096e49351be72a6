"""Fails at its first two attempts, before it joins a group, and ends well at the third."""

import os

if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
    raise OSError("not yet")  # FAULT
