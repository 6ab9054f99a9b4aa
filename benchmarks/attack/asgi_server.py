"""Models of the server under attack as an ASGI application."""

import dragoman
from benchmarks.attack.server import MODELS

application = dragoman.asgi(MODELS["doubled"], MODELS["Rows"])
