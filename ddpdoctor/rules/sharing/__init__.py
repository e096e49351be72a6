"""What the arithmetic of an epoch means for training."""
