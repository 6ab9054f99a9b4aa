"""HTTP/2 on the wire: frames (RFC 9113) and header fields (RFC 7541)."""
