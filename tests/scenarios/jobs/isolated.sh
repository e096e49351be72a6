#!/bin/sh
# Starts its ranks in isolated Pythons, which no start-up hook reaches.
exec "$PYTHON" -I "$(dirname "$0")/plain.py" clean_plain
