"""Compare the answers of Dragoman and MLServer 1.7.1 to the same requests, on the same folder of models."""
