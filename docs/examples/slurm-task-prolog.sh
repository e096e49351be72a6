#!/bin/sh
# TaskProlog of slurm.conf: prints what is wrong with the node into the output of the job, once per node.
# Slurm shows only lines that begin with "print". The job starts whatever is found.
[ "${SLURM_LOCALID:-0}" = 0 ] || exit 0
env -u SLURM_PROCID -u SLURM_NTASKS timeout 60 ddpdoctor check-env --no-torch --fail-on error 2>&1 | sed 's/^/print /'
exit 0
