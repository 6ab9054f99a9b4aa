"""Text: an engine with continuous batching, runtimes of language models, and the APIs of their clients."""
