"""Becomes nobody, for whom the run folder is closed."""

import os

os.setgid(65534)
os.setuid(65534)
print(os.geteuid(), flush=True)
child = os.fork()
if child == 0:
    print("child", os.geteuid(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
raise SystemExit(2)
