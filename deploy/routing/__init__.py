"""Which replica serves a request: what each has to do, what a request asks for, and who hands it out."""
