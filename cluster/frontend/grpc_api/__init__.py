"""The gRPC edge: what Serve's proxy calls, translated for the service and back."""
