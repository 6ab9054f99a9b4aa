"""Declarations of the commands of this package."""

from dragoman.cli.command import Command

CHAT = Command("chat with a language model", "dragoman_text.cli.chat")
