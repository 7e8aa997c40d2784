"""One module per backend. Backends do not import each other; `gdpa.dispatch` chooses among them."""
