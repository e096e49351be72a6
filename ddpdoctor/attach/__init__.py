"""Inspects a running job from outside without disturbing it, and saves what it sees."""
