"""Is interrupted, and dies of KeyboardInterrupt with its traceback."""

import os
import signal

print("at work", flush=True)
os.kill(os.getpid(), signal.SIGINT)
