"""The command `dragoman batch`."""
