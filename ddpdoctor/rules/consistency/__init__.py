"""Rules that compare what ranks hold: whether replicas are still one model."""
