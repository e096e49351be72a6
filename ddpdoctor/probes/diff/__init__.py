"""Compares the checkpoint files of ranks or runs: `check-consistency --diff`."""
