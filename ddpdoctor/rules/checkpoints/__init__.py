"""Rules about checkpoint files: damage, contents against a model, values, and the files next to them."""
