"""A load generator for OpenAI-compatible endpoints: what is sent, how it is timed, and what the run showed."""
