"""Reads what a job left behind: logs, flight-recorder dumps, stacks. Nothing in here needs torch."""
