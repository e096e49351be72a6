"""Runs the user's model under DDP and checks that the replicas stay equal."""
