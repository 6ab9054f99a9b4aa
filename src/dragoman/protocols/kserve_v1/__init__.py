"""KServe's V1 inference protocol."""
