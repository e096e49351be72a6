"""Nodes that meet before a job, on several hosts."""
