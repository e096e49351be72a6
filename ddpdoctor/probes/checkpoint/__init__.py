"""Reads checkpoint files without running any code in them."""
