"""Log evidence of a posterior: determinants, its parts, and records of tuning by it."""
