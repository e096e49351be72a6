"""Reads machines and run folders, and returns facts without judging them."""
