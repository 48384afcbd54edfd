"""nanotron: its YAML file in both directions."""
