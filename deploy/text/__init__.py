"""Text at the edges of the engine: tokenizer, chat template, incremental detokenisation, stop strings."""
