"""Fingerprints of each replica of a model."""
