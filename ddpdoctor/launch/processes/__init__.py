"""Starts and stops processes."""
