"""Real tokenizers and chat templates, compared with transformers: ./scripts/test-real-text."""
