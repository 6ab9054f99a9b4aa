"""Message formats of Open Inference and UM-Bridge, without a transport: for servers, codecs and clients."""
