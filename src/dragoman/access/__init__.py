"""Authentication and authorization: API keys, JSON Web Tokens, roles, limits of each key."""
