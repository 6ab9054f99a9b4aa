"""Limits of memory and time of one request of a text API; `core.text_limits` has those of every generation.

docs/text-limits.md lists all of them.
"""

# Lists of a request.
MAX_MESSAGES = 4096
MAX_PROMPTS = 256
MAX_PROMPT_IDS = 1 << 18
MAX_TEXTS = 2048
MAX_TOOLS = 128
LMI_INPUTS = 256

MAX_TEMPLATE_CHARACTERS = 65_536

# Defaults of TGI's launcher.
TGI_INPUTS = 4
TGI_STOPS = 4
TGI_BEST_OF = 2
TGI_TOP = 5

# A processor that scales the shorter side of a thin image would make a huge image of it.
MAX_IMAGE_RATIO = 200

# Tool calls in a completion. Longer text is not a call.
MAX_CALL_START_CHARACTERS = 4096
MAX_PYTHON_CALL_CHARACTERS = 65_536
