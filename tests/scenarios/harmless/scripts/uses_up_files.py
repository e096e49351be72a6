"""Opens files up to its limit, and goes on."""

import os
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(error)
child = os.fork()
if child == 0:
    print("child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
