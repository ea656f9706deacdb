"""Drafters: what proposes the tokens that a model verifies. `workers.models.drafter` is their contract."""
