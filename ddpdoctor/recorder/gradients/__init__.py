"""Looks for inf and NaN in local gradients."""
