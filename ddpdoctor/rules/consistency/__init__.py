"""Rules over what ranks hold: whether replicas are still one model."""
