"""Processes that accept connections and forward calls to the engine's process."""
