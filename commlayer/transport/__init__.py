"""Point-to-point transport between peers: frames, connections, TLS, reconnect, TCP and gRPC carriers."""
