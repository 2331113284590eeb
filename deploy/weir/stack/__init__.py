"""All services of one machine: started, watched, and stopped in order."""
