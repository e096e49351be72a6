"""A job of several nodes: who takes part, and what they send each other."""
