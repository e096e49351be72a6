"""The script asks for a larger world than was started."""

import os

from training import train

train(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]) + 1)
