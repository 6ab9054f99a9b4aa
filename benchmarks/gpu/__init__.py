"""The GPU kit: checks and measurements on a machine with a GPU, in one command. See benchmarks/README.md."""
