"""Machine code that is written in Python: no compiler is needed but llvmlite, where it is installed."""
