"""Where latentserve runs: Ray Serve application, HTTP API, router, metrics, command line."""
