"""The serving layer of latentserve: Ray Serve application, HTTP API, router, metrics, command line."""
