"""HTTP itself: bodies and their limits, errors, layers around the application, the OpenAPI description."""
