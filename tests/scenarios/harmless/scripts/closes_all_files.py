"""Closes all files that it did not open, as daemons do, and opens its own: they get the numbers of those closed."""

import os
import signal
from pathlib import Path

os.closerange(3, 65536)
os.chdir(os.environ["WORK"])
files = [Path(str(number)).open("w+") for number in range(60)]  # noqa: SIM115 - closed below
child = os.fork()
if child == 0:
    for file in files:
        file.write("child\n")
        file.flush()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for file in files:
    file.seek(0)
    text = file.read()
    file.write("parent\n")
    file.close()
    assert text == "child\n", (file.name, text)
print(len(files), "files kept", flush=True)
signal.raise_signal(signal.SIGBUS)
