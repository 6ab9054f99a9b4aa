"""Functions of vectors coupled into one, with the chain rule through them."""
