"""Compatibility with Triton: `config.pbtxt` and the module `triton_python_backend_utils` of its Python backend."""
