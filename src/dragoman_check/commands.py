"""Declarations of the commands of this package."""

from dragoman.cli.command import Command

CHECK = Command("check that a server conforms to its protocols", "dragoman_check.cli.check")
BENCH = Command("measure latency and throughput of a model", "dragoman_check.cli.bench")
TOP = Command("show what a running server does, refreshed every second", "dragoman_check.cli.top")
