"""What a trial of settings shows: how much each changes the step, and which one to change."""
