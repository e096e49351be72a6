"""Tries what a start needs: the door of the store, every pair of nodes, a real process group."""
