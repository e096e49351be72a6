"""Tries settings of DDP in turns inside one job that is thrown away, and measures the steps under each."""
