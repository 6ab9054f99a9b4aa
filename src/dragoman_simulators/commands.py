"""Declarations of the commands of this package."""

from dragoman.cli.command import Command

GRAPH = Command("check a graph of models and print it as a Mermaid diagram", "dragoman_simulators.cli.graph")
CHECK_DERIVATIVES = Command("check the derivatives of a model", "dragoman_simulators.cli.check_derivatives")
