"""The engine: model lookup, admission, batching and model control, for the calls of every protocol."""
