"""Clients of servers of the Open Inference Protocol, over REST or gRPC."""

from dragoman.client.pictures import picture as picture
