"""Rules over checkpoint files: damage, contents against a model, values, and what lies beside them."""
