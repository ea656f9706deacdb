"""What models are made of: layers, attention, experts, and the execution paths through them."""
