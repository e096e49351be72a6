"""Runs ddpdoctor as a rank of torchrun. NCCL takes the ranks for hosts of their own, which may share a GPU."""

import runpy

import place  # noqa: F401 - sets what NCCL reads

runpy.run_module("ddpdoctor", run_name="__main__", alter_sys=True)
