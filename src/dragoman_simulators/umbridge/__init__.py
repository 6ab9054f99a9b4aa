"""UM-Bridge over HTTP."""
