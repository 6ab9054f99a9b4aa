"""Requests and responses that several text protocols share: parameters, chats, completions, grammars, tool calls."""
