"""EAGLE-3 draft models: whether one fits its model, how one is read, and how it drafts."""
