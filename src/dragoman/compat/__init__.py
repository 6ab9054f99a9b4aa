"""Existing folders and custom models of MLServer: what their files say, and a module `mlserver` for their code."""
