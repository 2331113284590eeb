"""`weir top`: a live view of a deployment on a terminal."""
