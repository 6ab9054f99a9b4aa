"""The text engine: prompts become texts, many at a time, a token of each at every step."""
