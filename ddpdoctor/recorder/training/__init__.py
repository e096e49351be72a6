"""Steps of training, and DDP's part in them."""
