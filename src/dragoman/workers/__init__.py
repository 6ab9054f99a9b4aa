"""Worker pools: where a model runs, on the event loop, in threads or in processes."""
