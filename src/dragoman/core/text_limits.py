"""Limits of memory and time of one text request. docs/text-limits.md lists all of them."""

# Lists of a request.
MAX_MESSAGES = 4096
MAX_PROMPTS = 256
MAX_PROMPT_IDS = 1 << 18
MAX_TEXTS = 2048
MAX_TOOLS = 128
LMI_INPUTS = 256

# Parameters.
MAX_STOPS = 64
MAX_TOKEN_IDS = 256
MAX_WORDS = 256
MAX_WORD_CHARACTERS = 4096
MAX_BIASES = 1024
MAX_TOP = 20
MAX_TEMPLATE_CHARACTERS = 65_536

# Defaults of TGI's launcher.
TGI_INPUTS = 4
TGI_STOPS = 4
TGI_BEST_OF = 2
TGI_TOP = 5

# Images. A processor that scales the shorter side of a thin image would make a huge image of it. Encoders write about
# ten scans of a progressive JPEG, three of another; each is a pass over all pixels and may be a few bytes of the file.
MAX_IMAGE_RATIO = 200
MAX_JPEG_SCANS = 100

# Tool calls in a completion. Longer text is not a call.
MAX_CALL_START_CHARACTERS = 4096
MAX_PYTHON_CALL_CHARACTERS = 65_536
