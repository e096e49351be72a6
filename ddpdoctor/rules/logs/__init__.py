"""Judges what logs, dumps and stacks say about a job that nobody watched."""
