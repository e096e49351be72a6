"""Changes its directory and its umask, and makes files with modes that it relies on."""

import os
from pathlib import Path

os.chdir(os.environ["WORK"])
for mask in (0, 0o777, 0o027):
    os.umask(mask)
    Path(str(mask)).touch()
    print(oct(Path(str(mask)).stat().st_mode), flush=True)
child = os.fork()
if child == 0:
    os._exit(os.umask(0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
