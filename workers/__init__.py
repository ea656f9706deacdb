"""One replica's work: scheduler, step plan, model, speculation, sampling, graphs, weights."""
