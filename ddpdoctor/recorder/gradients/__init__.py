"""Checks local gradients for inf and NaN."""
