"""Forks: a child that works on and exits, one that runs another program, and those of multiprocessing."""

import multiprocessing
import os
import sys


def wait(pid):
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def fail(text):
    raise ValueError(text)


def main():
    child = os.fork()
    if child == 0:
        print("child works", sum(range(1000)), flush=True)
        sys.exit(3)
    wait(child)
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", "print('another program')"])
    wait(child)
    child = os.fork()
    if child == 0:
        os._exit(4)
    wait(child)
    for method, target, argument in (("fork", fail, "text"), ("spawn", sys.exit, 5), ("spawn", os._exit, 6)):
        process = multiprocessing.get_context(method).Process(target=target, args=(argument,), name="worker")
        process.start()
        process.join()
        print("process ended with", process.exitcode, flush=True)


if __name__ == "__main__":
    main()
