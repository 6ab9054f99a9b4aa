"""The wires: one file a protocol, each a table of pure functions between the wire and calls."""
