"""Reads fingerprints of model replicas, and compares them between ranks and nodes."""
