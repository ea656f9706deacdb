"""The ranks of a replica as one group: where they meet, and what they compute together."""
