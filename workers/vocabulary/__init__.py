"""A model folder's tokenizer as it is published, and the bytes of its tokens."""
