"""A rank raises before it joins the group."""

import os

from training import train

if os.environ["RANK"] == "2":
    raise FileNotFoundError("/data/shard-2")  # FAULT
train()
