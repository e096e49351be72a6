"""Compares the replicas of a job while it runs, on one node and between nodes."""
