"""Limits of the parameters of a generation, and of pictures. docs/text-limits.md lists all of them."""

MAX_STOPS = 64
MAX_TOKEN_IDS = 256
MAX_WORDS = 256
MAX_WORD_CHARACTERS = 4096
MAX_BIASES = 1024
MAX_TOP = 20

# Encoders write about ten scans of a progressive JPEG, three of another; each is a pass over all pixels and may be a
# few bytes of the file.
MAX_JPEG_SCANS = 100
