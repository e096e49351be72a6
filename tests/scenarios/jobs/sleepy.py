"""Waits, without torch, until it is asked to end; the signals it gets go to the file SIGNALS."""

import os
import signal
import time


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
