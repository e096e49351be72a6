"""Calls exec on itself, as scripts do that must set a variable before the start."""

import os
import sys

if "SECOND" not in os.environ:
    print("first", flush=True)
    os.environ["SECOND"] = "1"
    os.execv(sys.executable, [sys.executable, __file__])
print("second", os.environ["RANK"])
