"""Compare the answers of Dragoman and another server to the same requests, on the same folder of models."""
