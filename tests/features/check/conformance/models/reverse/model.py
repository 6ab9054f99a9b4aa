"""A text model: words of the prompt in reverse order."""

from text_server import ReverseModel


class Reverse(ReverseModel):
    pass
