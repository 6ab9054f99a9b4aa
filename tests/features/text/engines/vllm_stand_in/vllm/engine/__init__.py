"""Options of the engine."""
