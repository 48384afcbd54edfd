"""Shell: scripts and words as bash understands them, and changes of their text. Nothing is run."""
