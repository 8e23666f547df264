"""Who a model is, by the content of its files."""
