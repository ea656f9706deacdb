"""Whether a model fits: its settings, by its config.json alone, and its memory, without a GPU."""
