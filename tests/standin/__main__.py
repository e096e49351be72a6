"""Runs a command with torch's CUDA build on a stand-in for GPUs.

python -m tests.standin                                           make the environment, and print its Python
python -m tests.standin ddpdoctor wrap --nproc-per-node=2 job.py
python -m tests.standin torchrun --nproc-per-node=2 job.py
python -m tests.standin --torch 2.14.1 python job.py

README.md beside this file says what is real there, and which variables make a device slow, small or lost.
"""

import argparse
import os
import sys

from tests.standin import environment


def main() -> None:
    """Become the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.standin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", default=environment.TORCH, metavar="VERSION", help="[default: %(default)s]")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python, torchrun, ddpdoctor or any other")
    options = parser.parse_args()
    try:
        python = environment.make(options.torch)
    except environment.NotMadeError as error:
        sys.exit(f"tests.standin: {error}")
    if not options.command:
        print(python)
        return
    os.environ.update(environment.variables(python))
    try:
        os.execvp(options.command[0], options.command)
    except OSError as error:
        sys.exit(f"tests.standin: cannot run {options.command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
