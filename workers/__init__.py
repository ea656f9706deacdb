"""What one replica does: scheduler, step plan, model, speculation, sampling, graphs, weights."""
