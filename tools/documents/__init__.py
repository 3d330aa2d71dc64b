"""What makes parts of the documents: pages of the site, tables, pictures."""
