"""MLServer 1.7.1 with its runtimes: models, requests, and the known differences."""
