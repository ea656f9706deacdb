"""Parts of models: layers, attention, experts, and the execution paths through them."""
