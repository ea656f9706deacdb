"""Observability of a running application: figures for Ray's metrics, a Grafana dashboard, structured logs."""
