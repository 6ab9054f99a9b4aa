"""An application for a real ASGI server process: `uvicorn asgi_server:app`."""

from pathlib import Path

import dragoman

_MODELS = Path(__file__).with_name("asgi_models.py")
app = dragoman.asgi(f"{_MODELS}:Twice", f"{_MODELS}:Steps", max_body_bytes=10_000)
