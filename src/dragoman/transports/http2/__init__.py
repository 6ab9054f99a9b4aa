"""HTTP/2: bytes in, bytes out, and streams between them (RFC 9113, RFC 7541)."""
