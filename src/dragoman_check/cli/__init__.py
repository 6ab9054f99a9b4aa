"""The commands `dragoman check` and `dragoman bench`."""
