"""Attack suite: how long a well-behaved client waits, and the server's memory, while another client attacks."""
