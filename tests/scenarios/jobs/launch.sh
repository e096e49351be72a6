#!/bin/bash
# Starts WORLD_SIZE ranks as launchers do that set RANK and the like themselves.
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    RANK=$rank LOCAL_RANK=$rank "$PYTHON" ${PYTHON_OPTIONS:-} "$1" &
done
status=0
for job in $(jobs -p); do
    wait "$job" || status=$?
done
exit "$status"
