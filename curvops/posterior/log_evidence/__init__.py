"""The log evidence of a posterior: determinants, parts, and records of tuning."""
