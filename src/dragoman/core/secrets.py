"""The secret settings of the server, which no process that it starts may see."""

import os

# Settings whose values are secret, by name. Their environment variables stay in the server's process.
SECRET_SETTINGS = ("control_token",)
_VARIABLES = frozenset(f"DRAGOMAN_{name.upper()}" for name in SECRET_SETTINGS)


def child_environment() -> dict[str, str]:
    """Return a copy of this process's environment without the server's secrets."""
    return {name: value for name, value in os.environ.items() if name not in _VARIABLES}


def forget_secrets() -> None:
    """Remove the server's secrets from this process's environment, once they have been read."""
    for name in _VARIABLES:
        os.environ.pop(name, None)
