"""Calls of torch.distributed."""
