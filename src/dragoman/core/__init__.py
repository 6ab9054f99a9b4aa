"""Values that every protocol, runtime and worker uses: calls, tensors, signatures, errors."""
