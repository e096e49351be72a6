"""A rank finds nothing to do, and leaves before it joins the group."""

import os
import sys

from training import train

if os.environ["RANK"] == "1":
    sys.exit()  # FAULT
train()
