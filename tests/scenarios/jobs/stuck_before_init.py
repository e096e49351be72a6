"""A rank is held up on its way to init_process_group."""

import os
import time

from training import train

if os.environ["RANK"] == "1":
    time.sleep(100000)  # FAULT
train()
