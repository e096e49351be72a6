"""Deletes its working directory while it works in it, and cannot say where it is."""

import os
import shutil
from pathlib import Path

os.chdir(os.environ["WORK"])
shutil.rmtree(os.environ["WORK"])
try:
    Path.cwd()
except FileNotFoundError as error:
    print(error)
import json  # noqa: E402

print(json.dumps([1]))
