"""What models are made of: layers, attention, experts, and the ways a pass takes through them."""
