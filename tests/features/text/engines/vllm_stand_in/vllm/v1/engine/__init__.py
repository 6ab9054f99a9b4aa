"""The engine of the stand-in."""
