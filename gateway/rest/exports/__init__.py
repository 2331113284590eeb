"""`GET /admin/export`: which sessions and turns it has, and the rows of each format."""
