"""Services of the operating system: event loop, threads, shared memory, allocator, signals and logging."""
