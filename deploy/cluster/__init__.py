"""A cluster of Ray: how it is begun, joined, set up for an application, and ended."""
