"""HTTP/1.1: parsing requests and writing responses, mostly without I/O, and the connection that moves the bytes."""
