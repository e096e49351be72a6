"""One process that never imports torch."""

import sys

print("out", *sys.argv[1:])
print("err", file=sys.stderr)
