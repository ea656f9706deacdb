"""Settings: of an application, of its HTTP front."""
