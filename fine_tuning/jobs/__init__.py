"""Jobs: what a request may ask for, and what is stored of a job."""
