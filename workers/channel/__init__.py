"""Communication between the processes of a replica: how they find, hear and trust each other."""
