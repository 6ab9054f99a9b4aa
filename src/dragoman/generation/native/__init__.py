"""A step of Llama and its kin as machine code of our own: what follows texts that are being written."""
