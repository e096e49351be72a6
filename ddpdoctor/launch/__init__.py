"""Starts the ranks, watches, takes evidence, stops; returns facts."""
