"""One module for each kind of attack, with a tuple `ATTACKS`."""
