"""Loaded into the ranks by ``wrap``; imports nothing of ours beyond this folder and nothing heavy."""
