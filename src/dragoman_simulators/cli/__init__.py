"""Commands: graph, check derivatives."""
