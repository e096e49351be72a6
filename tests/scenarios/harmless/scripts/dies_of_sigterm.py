"""Has no handler, and dies of SIGTERM."""

import os
import signal

print(signal.getsignal(signal.SIGTERM), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
