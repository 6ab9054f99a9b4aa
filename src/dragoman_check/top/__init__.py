"""What a running server does, refreshed every second: read from its metrics and its status, shown on a terminal."""
