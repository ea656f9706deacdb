"""Routing: the choice of the replica that serves a request, by the load of each and by what a request asks for."""
