"""Who may come in and how much: capacity, API keys and their limits."""
