#!/bin/sh
# A rank behind a shell script.
exec_in_child() { "$PYTHON" "$@"; }
exec_in_child "$(dirname "$0")/died.py" crash_everywhere
