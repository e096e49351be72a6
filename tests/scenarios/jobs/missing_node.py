"""The script was written for two machines, and one was started."""

import os

from training import train

train(rank=int(os.environ["RANK"]), world_size=4)
