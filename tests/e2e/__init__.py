"""End-to-end tests: a real server process, and the clients that people use."""
