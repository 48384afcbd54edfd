"""Files of nested tables: their values by dotted names, and the same files with changes."""
