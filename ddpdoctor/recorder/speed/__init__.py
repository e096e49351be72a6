"""What the speed of training depends on, besides the steps themselves."""
