"""Open Inference Protocol (V2) over REST and gRPC."""
