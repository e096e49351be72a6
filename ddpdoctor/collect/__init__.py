"""Reads machines and run folders and returns facts; never judges."""
