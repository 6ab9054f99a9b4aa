"""Declarations of the commands of this package."""

from dragoman.cli.command import Command

DEMO = Command("serve a few models and a small language model, to try", "dragoman_demo.demo")
