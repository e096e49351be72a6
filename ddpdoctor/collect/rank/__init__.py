"""What one rank recorded, and what else a run folder says of it."""
