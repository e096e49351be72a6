"""Fingerprints of replicas: reads them, and compares them between ranks and nodes."""
