"""Admission of requests: capacity, API keys and their limits."""
