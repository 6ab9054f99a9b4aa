"""Commands: chat."""
