"""The Ray Serve application and its replicas, and the services around them while they start, serve and end."""
