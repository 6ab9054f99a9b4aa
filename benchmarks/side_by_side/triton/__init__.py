"""Triton of the wheel nvidia-pytriton with its Python backend: models, requests, and the known differences."""
