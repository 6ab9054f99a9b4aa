"""One Python model server that speaks for a model in every inference protocol."""
