"""Conformance checks of servers: clauses of each protocol, run over the network against any server."""
