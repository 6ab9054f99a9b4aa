"""Limits of memory and time of one text request. docs/text-generation.md lists all of them."""

# Lists of a request.
MOST_MESSAGES = 4096
MOST_PROMPTS = 256
MOST_PROMPT_IDS = 1 << 18
MOST_TEXTS = 2048
MOST_TOOLS = 128
LMI_INPUTS = 256

# Parameters.
MOST_STOPS = 64
MOST_TOKEN_IDS = 256
MOST_WORDS = 256
MOST_WORD_CHARACTERS = 4096
MOST_BIASES = 1024
MOST_TOP = 20
MOST_TEMPLATE_CHARACTERS = 65_536

# Defaults of TGI's launcher, and its limit of Vertex AI.
TGI_INPUTS = 4
TGI_INSTANCES = 128
TGI_STOPS = 4
TGI_BEST_OF = 2
TGI_TOP = 5

# Images. A processor that scales the shorter side of a thin image would make a huge image of it. Encoders write about
# ten scans of a progressive JPEG; each is a pass over all pixels and may be a few bytes of the file.
MOST_IMAGE_RATIO = 200
MOST_JPEG_SCANS = 100

# Tool calls in a completion. Longer text is not a call.
MOST_CALL_START_CHARACTERS = 4096
MOST_PYTHON_CALL_CHARACTERS = 65_536
