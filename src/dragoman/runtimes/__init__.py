"""Frameworks as models, one file each; a framework is imported when its first model is loaded."""
