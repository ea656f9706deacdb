"""What a model writes around its answer: reasoning and tool calls, told apart while the text arrives."""
