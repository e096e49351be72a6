"""Every attempt fails in a way of its own; the third ends well where LAST_WELL is set.

No attempt joins a group: Gloo's own connect fails in about half of all restarts on one host, under torchrun too.
"""

import os
import signal
import time

RANK = os.environ["RANK"]


def main():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and RANK == "1":
        raise ValueError("the first batch is bad")  # FAULT
    if attempt == 1 and RANK == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 2 and "LAST_WELL" in os.environ:
        return
    if attempt == 2 and RANK == "1":
        raise LookupError("out of luck")
    time.sleep(60)


main()
