"""Paged caches: what a rank keeps of every token, page by page."""
