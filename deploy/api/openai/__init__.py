"""OpenAI's API: completions, chats, models, and vLLM's endpoints for tokens."""
