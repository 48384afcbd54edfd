"""Other training programs: a layout as each one's own arguments."""
