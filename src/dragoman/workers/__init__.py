"""Where a model lives: on the event loop, in threads of this process, or in processes of its own."""
