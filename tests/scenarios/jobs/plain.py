"""Jobs that train without torch, or not at all: each function is a job, and its name is the argument."""

import os
import signal
import sys
import time


def clean_plain(*words):
    """One process that never imports torch."""
    print("out", *words)
    print("err", file=sys.stderr)


def echo(*words):
    """Writes what it was given: arguments, standard input, working directory; ends with a status."""
    print(list(words), sys.stdin.read(), os.getcwd(), os.environ["RANK"])
    print("an error line", file=sys.stderr)
    sys.exit(int(os.environ.get("STATUS", "0")))


def sleepy():
    """Waits, without torch, until it is asked to end; the signals it gets go to the file SIGNALS."""

    def note(number, _frame):
        with open(os.environ["SIGNALS"], "a") as file:
            file.write(signal.Signals(number).name + "\n")
        if number != signal.SIGUSR1:
            raise SystemExit(7)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, note)
    with open(os.environ["SIGNALS"], "a") as file:
        file.write("ready\n")
    while True:
        time.sleep(0.05)


def each_attempt():
    """Every attempt fails in a way of its own.

    No attempt joins a group: Gloo's own connect fails in about half of all restarts on one host, under torchrun too.
    """
    RANK = os.environ["RANK"]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and RANK == "1":
        raise ValueError("the first batch is bad")  # FAULT
    if attempt == 1 and RANK == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 2 and RANK == "1":
        raise LookupError("out of luck")
    time.sleep(60)


def fails_twice():
    """Fails at its first two attempts, before it joins a group, and ends well at the third."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
        raise OSError("not yet")  # FAULT


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
