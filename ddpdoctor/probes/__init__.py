"""Programs that run in their own Python process and import torch."""
