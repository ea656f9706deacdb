"""The OpenAI-compatible HTTP front of a replica. Import-light: every process of an application reads its settings."""
