"""The language of the house: the values that every protocol, runtime and worker speaks."""
