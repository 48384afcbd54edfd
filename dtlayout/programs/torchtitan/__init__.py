"""torchtitan: its TOML file in both directions, and the commands that start it."""
