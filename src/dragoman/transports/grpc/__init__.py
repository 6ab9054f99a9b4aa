"""gRPC on our own HTTP/2 (the specification "gRPC over HTTP2")."""
