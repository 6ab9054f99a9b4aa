"""Clients of servers of the Open Inference Protocol, over REST or gRPC."""
