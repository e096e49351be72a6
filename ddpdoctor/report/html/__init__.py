"""The page: a report as one HTML file that loads nothing from elsewhere."""
