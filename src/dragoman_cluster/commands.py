"""Declarations of the commands of this package."""

from dragoman.cli.command import Command

WORKER = Command("run a model for a server on another machine", "dragoman_cluster.worker_command")
