"""NeMo AutoModel: the YAML file of its recipe in both directions."""
