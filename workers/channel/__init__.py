"""How the processes of a replica find, hear and trust each other."""
