"""Conformance checks and load tests of any server of the protocols that Dragoman serves."""
