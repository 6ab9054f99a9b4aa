"""Long arrays of numbers as decimal digits and back, in machine code where llvmlite is installed."""
