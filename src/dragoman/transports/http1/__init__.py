"""HTTP/1.1: what comes in and what goes out as pure state, and the connection that moves the bytes."""
