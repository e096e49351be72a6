"""Reads how this process was launched, and its place among the nodes of a job."""
