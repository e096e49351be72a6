"""Writes what it was given: arguments, standard input, working directory; ends with a status."""

import os
import sys

print(sys.argv[1:], sys.stdin.read(), os.getcwd(), os.environ["RANK"])
print("an error line", file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", "0")))
