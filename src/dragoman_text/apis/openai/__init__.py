"""OpenAI's API: models, completions, chats and embeddings."""
