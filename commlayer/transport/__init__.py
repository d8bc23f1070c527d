"""Point-to-point transport between peers: frames, connections, TLS, reconnect, over TCP or gRPC."""
