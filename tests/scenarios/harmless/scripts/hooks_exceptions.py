"""Has hooks of its own for exceptions, and cares whether others have."""

import sys
import threading
import traceback

print(sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__)


def fail(text):
    raise LookupError(text) from KeyError("cause")


def in_thread():
    thread = threading.Thread(target=fail, args=("thread",), name="t")
    thread.start()
    thread.join()


in_thread()
previous = sys.excepthook, threading.excepthook


def hook(kind, error, trace):
    print("hook", kind, error, [(f.name, f.lineno) for f in traceback.extract_tb(trace)], trace is error.__traceback__)
    sys.__excepthook__(kind, error, trace)
    previous[0](kind, error, trace)


def thread_hook(args):
    print("thread", args.exc_type, args.exc_value, args.thread.name, len(traceback.extract_tb(args.exc_traceback)))
    previous[1](args)


sys.excepthook, threading.excepthook = hook, thread_hook
in_thread()
fail("main")
