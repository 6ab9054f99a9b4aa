"""Clients of any server that speaks the Open Inference Protocol, over REST or gRPC."""
