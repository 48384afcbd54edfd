"""What is registered here is imported by its own test alone."""

collect_ignore = ["plugins"]
