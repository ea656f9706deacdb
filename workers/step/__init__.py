"""A step on one rank: its rows' state, its passes through the model, sampling and drafts."""
