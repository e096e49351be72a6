#!/bin/sh
# Prolog of slurm.conf: fails if this node is not fit. Slurm then drains the node and requeues the job.
# Only checks of the node itself: expected versions, GPUs, their links, InfiniBand, shared memory.
PATH=${DDPDOCTOR_BIN:-/opt/ddpdoctor/bin}:$PATH
timeout 60 ddpdoctor check-env --no-torch --fail-on error DD106 DD30 DD31 DD32 DD33 shm >/tmp/ddpdoctor-prolog.txt 2>&1
# 1: something is wrong with the node. A check that could not run (4), or ddpdoctor itself (3), must not drain it.
[ $? -ne 1 ]
