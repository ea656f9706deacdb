"""What Ray Serve runs, an application and its replicas, and what surrounds them while they come, serve and go."""
