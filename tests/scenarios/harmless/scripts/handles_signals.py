"""Has handlers of its own for signals, put in place twice, here and in a process that it forks, and one that raises."""

import os
import signal
import sys
import traceback

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGINT, signal.SIGCHLD)


def first(number, frame):
    print("first", number, frame.f_code.co_name, frame.f_lineno)


def second(number, frame):
    print("second", number, frame.f_code.co_name)
    first(number, frame)


def main():
    for handler in (first, second):
        for number in NUMBERS:
            before = signal.signal(number, handler)
            print(number, getattr(before, "__name__", before))
        for number in NUMBERS:
            os.kill(os.getpid(), number)


def be_the_child():
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGURG)
    os.kill(os.getpid(), signal.SIGTERM)
    print(signal.getsignal(signal.SIGURG).__name__, flush=True)
    os._exit(0)


def raises(number, frame):
    raise TimeoutError(f"{number} in {frame.f_code.co_name}")


def is_interrupted():
    signal.signal(signal.SIGUSR1, raises)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    except TimeoutError:
        traceback.print_exc(file=sys.stdout)
    print(signal.signal(signal.SIGUSR1, signal.SIG_IGN) is raises, signal.getsignal(signal.SIGUSR1))


main()
is_interrupted()
print(os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1]), flush=True)
# Fork and wait share a line: the handler prints the line it interrupts, and the child may end before the wait begins.
os.waitpid(os.fork() or be_the_child(), 0)
