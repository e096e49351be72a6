"""Tries what a job needs to start: the store's port, a connection between every two nodes, a real process group."""
