"""Fair use: what each key uses by model and day, limits of tokens, and `GET /v1/usage`."""
