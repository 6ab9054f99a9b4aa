"""Declarations of the commands of this package."""

from dragoman.cli.command import Command

GRAPH = Command("draw and check a graph of models", "dragoman_simulators.cli.graph")
CHECK_DERIVATIVES = Command("check the derivatives of a model", "dragoman_simulators.cli.check_derivatives")
