"""Uses faulthandler in every way that it has, and then ends by a fatal signal."""

import faulthandler
import os
import signal
import sys

print(faulthandler.is_enabled(), faulthandler.disable(), faulthandler.is_enabled())
faulthandler.enable()
print(faulthandler.is_enabled(), faulthandler.disable(), faulthandler.is_enabled())
faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
os.kill(os.getpid(), signal.SIGUSR1)
print(faulthandler.unregister(signal.SIGUSR1), faulthandler.unregister(signal.SIGUSR1))
faulthandler.dump_traceback_later(1000)
faulthandler.cancel_dump_traceback_later()
faulthandler.dump_traceback(all_threads=False)
if not faulthandler.is_enabled():
    faulthandler.enable(all_threads=False)
sys.stdout.flush()
child = os.fork()
if child == 0:
    print(faulthandler.is_enabled(), flush=True)
    signal.raise_signal(signal.SIGSEGV)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
signal.raise_signal(signal.SIGABRT)
