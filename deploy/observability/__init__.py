"""How a running application is watched: figures for Ray's metrics, a Grafana dashboard, structured logs."""
