"""Has another root, in which there is no run folder and no Python."""

import os
from pathlib import Path

os.chroot(os.environ["WORK"])
os.chdir("/")
print(list(Path("/").iterdir()), flush=True)
child = os.fork()
if child == 0:
    print("child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
