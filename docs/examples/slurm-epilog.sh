#!/bin/sh
# Epilog of slurm.conf: takes a node out of use that a job has left with broken GPUs. Slurm drains a node whose Epilog fails.
PATH=${DDPDOCTOR_BIN:-/opt/ddpdoctor/bin}:$PATH
timeout 60 ddpdoctor check-env --no-torch --fail-on error DD307 DD308 DD311 DD319 >/tmp/ddpdoctor-epilog.txt 2>&1
[ $? -ne 1 ]
