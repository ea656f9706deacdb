"""The self-test: before a replica serves, every captured graph is proven against eager."""
