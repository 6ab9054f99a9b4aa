"""The payload of the Open Inference Protocol as values, free of any transport: for servers, codecs and clients."""
