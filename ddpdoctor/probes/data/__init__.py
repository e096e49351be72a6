"""Reads the sample indices that the user's own loaders give each rank."""
