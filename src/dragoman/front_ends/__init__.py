"""Processes that speak with clients, and ask the one engine."""
