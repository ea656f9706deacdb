"""From a validated body to a job: the sequences that the engine is asked for."""
